"""How the kernel of the indexer's scores is started: sizes, shares of work, keys laid in order.

Where many rows share lists of entries, the keys are laid in order first, decoded unless the
products take codes: they are read hundreds of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.triton.index_keys import order_keys
from metainfer.kernels.triton.index_logits import index_logits
from metainfer.kernels.triton.launch import Launcher, cdiv, has_fp8, next_power_of_2
from metainfer.ops.index import DENSE, IndexCase

Coded: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

ORDERED_BYTES = 128 * 2**20
"""Memory for keys in order, at most."""

# Rows per list from which on laying keys in order pays.
_SHARING_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Attributes:
    columns: heads of all rows of a program.
    block: keys that are multiplied at a time.
    warps, stages: of a program.
    """

    columns: int
    block: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys as the products read them.

    Attributes:
        form: "dense", or the name of their format.
        keys, scales: plain numbers, or codes and scales.
        key_rows: lists of rows of keys; None where they lie in order, `stride` keys to a list.
        first, entries: which entries of each list.
    """

    form: str
    keys: torch.Tensor
    scales: torch.Tensor | None
    key_rows: torch.Tensor | None
    stride: int
    first: int
    entries: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that are scored at a time: arguments of the op, what they see, and their scores."""

    q: Coded
    weights_TH: torch.Tensor
    sequence_T: torch.Tensor | None
    seen_T: torch.Tensor
    candidates_TB: torch.Tensor | None
    scores_TW: torch.Tensor


def tile_of(case: IndexCase, form: str, capability: tuple[int, int], shares: bool) -> Tile:
    """Sizes for keys of one form, for several rows of one list each program or one row."""
    heads = max(16, next_power_of_2(case.heads))
    if case.dtype == "float32" and form == DENSE:
        return Tile(max(heads, 64) if shares else heads, 32, 4, 2)
    if form == "index_fp8" and capability >= (8, 9):
        return Tile(max(heads, 128) if shares else heads, 64, 4, 3 if shares else 5)
    return Tile(max(heads, 128) if shares else heads, 64, 4, 3)


def listed(case: IndexCase, keys: Coded, key_rows: torch.Tensor, entries: int) -> Keys:
    """Keys where the caches have them."""
    numbers, scales = (keys, None) if isinstance(keys, torch.Tensor) else keys
    return Keys(case.key_format, numbers, scales, key_rows, key_rows.stride(0), 0, entries)


def pieces_in_order(launch: Launcher, case: IndexCase, rows: int, shape: torch.Size) -> list[range]:
    """Entries that are laid in order at a time, of lists of the given shape; none where it does not
    pay."""
    lists, entries = shape
    if rows < _SHARING_ROWS * lists or not lists or not entries:
        return []
    piece = max(1, ORDERED_BYTES // (lists * _ordered_bytes(launch, case)))
    if piece < entries:
        piece = max(1, piece // 1024) * 1024
    return [range(entry, min(entry + piece, entries)) for entry in range(0, entries, piece)]


def _keeps_codes(launch: Launcher, case: IndexCase) -> bool:
    return case.key_format == "index_fp8" and has_fp8(launch)


def _ordered_bytes(launch: Launcher, case: IndexCase) -> int:
    """Of one key."""
    if _keeps_codes(launch, case):
        return case.width + 4
    return case.width * TORCH_DTYPES[case.dtype].itemsize


def in_order(
    launch: Launcher, case: IndexCase, keys: Coded, key_rows_BE: torch.Tensor, piece: range
) -> Keys:
    """The keys of some entries of each list, laid in order."""
    source = listed(case, keys, key_rows_BE, len(piece))
    lists, columns = len(key_rows_BE), len(piece)
    keeps = _keeps_codes(launch, case)
    dtype = torch.uint8 if keeps else TORCH_DTYPES[case.dtype]
    out = source.keys.new_empty(lists * columns, case.width, dtype=dtype)
    out_scales = source.keys.new_empty(lists * columns, dtype=torch.float32) if keeps else None
    block = 32
    launch(
        order_keys,
        (cdiv(columns, block), lists),
        source.keys,
        source.scales,
        key_rows_BE,
        out,
        out_scales,
        columns,
        source.stride,
        piece.start,
        WIDTH=case.width,
        FORM=case.key_format,
        KEEP=keeps,
        FP8=has_fp8(launch),
        BLOCK=block,
    )
    form = case.key_format if keeps else DENSE
    return Keys(form, out, out_scales, None, columns, piece.start, columns)


def score(
    launch: Launcher,
    case: IndexCase,
    rows: Rows,
    keys: Keys,
    own_lists: bool,
    skipped: int,
    tile: Tile | None = None,
) -> None:
    """Writes the scores of rows that see more than `skipped` entries, each as far as it sees.

    Args:
        own_lists: each row has a list of its own.
    """
    shares = not own_lists and rows.candidates_TB is None
    tile = tile or tile_of(case, keys.form, launch.capability, shares)
    heads = next_power_of_2(case.heads)
    count = len(rows.weights_TH)
    rows_each = max(1, tile.columns // heads) if shares else 1
    heads = max(heads, 16 // rows_each)
    programs = cdiv(count, rows_each)
    splits = _splits(launch, programs, cdiv(keys.entries, tile.block))
    q, q_scales = (rows.q, None) if isinstance(rows.q, torch.Tensor) else rows.q
    candidates = rows.candidates_TB
    launch(
        index_logits,
        (programs, splits),
        q,
        q_scales,
        rows.weights_TH,
        keys.keys,
        keys.scales,
        keys.key_rows,
        rows.sequence_T,
        rows.seen_T,
        candidates,
        rows.scores_TW,
        count,
        keys.entries,
        keys.first,
        splits,
        rows.weights_TH.stride(0),
        keys.stride,
        0 if candidates is None else candidates.shape[1],
        rows.scores_TW.shape[1],
        (case.width * case.heads) ** -0.5,
        HEADS=case.heads,
        HEADS_POWER=heads,
        WIDTH=case.width,
        R=rows_each,
        BLOCK=tile.block,
        Q_FORM=case.key_format,
        K_FORM=keys.form,
        FP8=has_fp8(launch),
        OWN_LISTS=own_lists,
        CANDIDATE_BLOCK=case.candidate_block,
        SKIPPED=skipped,
        UPCAST=launch.interpreted,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _splits(launch: Launcher, programs: int, blocks: int) -> int:
    """Shares of the keys, so that there are many programs for each multiprocessor, but not many
    for few blocks of keys."""
    wanted = cdiv(32 * launch.multiprocessors, max(programs, 1))
    return max(1, min(wanted, blocks // 4))
