"""attention.sparse_prefill in Triton.

Two kernels fulfil the contract; `tile_of` chooses from the case and the GPU alone:
    pairs: keys of 512 (+ 64) channels in bf16, two tiles of them an iteration.
    plain: everything else: other widths, fp32, entries as bytes that are too many to be decoded
        before, rows that 16-byte copies cannot read.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from metainfer.core.units import format_bytes
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.key_rows import format_constants
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2, shared_limit
from metainfer.kernels.triton.prefill_entries import MOST_DECODED_BYTES, Entries, readable
from metainfer.kernels.triton.prefill_pairs import list_rows, prefill_pairs
from metainfer.kernels.triton.prefill_plain import plain_tile, prefill_plain, serves
from metainfer.ops.attention import DENSE, AttentionCase

_log = logging.getLogger(__name__)

_COPY_BYTES = 16
_VALUE = 512


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds.

    Attributes:
        kernel: "pairs" or "plain".
        heads, keys: of a tile.
        stages: pairs of tiles that are in shared memory or on their way there, and one.
    """

    kernel: str
    heads: int
    keys: int
    warps: int
    stages: int = 1


def tile_of(case: AttentionCase, capability: tuple[int, int]) -> Tile:
    """The tile for a GPU; measured where it could be, see lab/kernels/README.md."""
    if case.dtype != "bfloat16" or case.width != _VALUE or case.rope_extra not in (0, 64):
        return Tile("plain", *plain_tile(case, 32), 8)
    heads = 16 if case.heads <= 16 else 32
    roomy = shared_limit(capability) >= 128 * 1024
    keys = 16 if case.rope_extra and heads == 32 and not roomy else 32
    return Tile("pairs", heads, keys, 4, 2)


def run(
    launch: Launcher,
    case: AttentionCase,
    q_THK: torch.Tensor,
    positions_T: torch.Tensor,
    latents_ND: torch.Tensor | None,
    latent_rows_T: torch.Tensor | None,
    sink_H: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
    entry_rows_BE: torch.Tensor | None = None,
    sequence_T: torch.Tensor | None = None,
    selected_TK: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The op; `tile` is chosen where none is given."""
    rows = len(q_THK)
    out_THD = q_THK.new_empty(rows, case.heads, case.width)
    lse_TH = q_THK.new_empty(rows, case.heads, dtype=torch.float32) if case.lse else None
    tile = tile or tile_of(case, launch.capability)
    read = readable(launch, case, positions_T, entries, entry_rows_BE, sequence_T)
    if read.coded != DENSE or not _copies(q_THK.dtype, latents_ND, read.rows):
        runs = rows and q_THK.device.type != "meta"
        if runs and read.coded != DENSE and tile.kernel == "pairs":
            _say_too_many(case)
        tile = Tile("plain", *plain_tile(case, 32, latents_ND, read.rows), 8)
    start = _pairs if tile.kernel == "pairs" else _plain
    start(
        launch, case, tile, read, (q_THK.contiguous(), positions_T, latents_ND, latent_rows_T),
        sink_H, sequence_T, selected_TK, out_THD, lse_TH,
    )  # fmt: skip
    return out_THD if lse_TH is None else (out_THD, lse_TH)


@cache  # once for each case
def _say_too_many(case: AttentionCase) -> None:
    _log.warning(
        "prefill over entries that take more than %s when decoded (%s, of every %d tokens) runs on"
        " the plain kernel, which is slower",
        format_bytes(MOST_DECODED_BYTES),
        case.entry_format,
        case.ratio,
    )


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _pairs(
    launch: Launcher,
    case: AttentionCase,
    tile: Tile,
    read: Entries,
    rows: Rows,
    sink_H: torch.Tensor | None,
    sequence_T: torch.Tensor | None,
    selected_TK: torch.Tensor | None,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor | None,
) -> None:
    q_THK, positions_T, latents_ND, _ = rows
    selects = read.rows is not None and selected_TK is not None
    listed, slots, stride = None, read.columns, read.table_stride
    if selects and selected_TK is not None:
        slots = stride = selected_TK.shape[1]
        listed = _listed_rows(launch, case, read, positions_T, sequence_T, selected_TK)
    elif read.table is not None:
        # Lists of 32 bits take half the registers; no cache has 2^31 rows.
        listed = read.table.to(torch.int32)
        stride = listed.stride(0)
    launch(
        prefill_pairs,
        (len(q_THK) * cdiv(case.heads, tile.heads),),
        *rows,
        sink_H,
        read.rows,
        listed,
        sequence_T,
        out_THD,
        lse_TH,
        q_THK.new_zeros(case.key_width),
        case.heads,
        slots,
        stride,
        case.score_scale * math.log2(math.e),
        **_constants(launch, case, tile, read, rows, sink_H, sequence_T),
        SELECTED=selects,
        LISTED=listed is not None,
        STAGES=tile.stages,
        LATENT_STRIDE=0 if latents_ND is None else latents_ND.stride(0),
        ENTRY_STRIDE=0 if read.rows is None else read.rows.stride(0),
        num_warps=tile.warps,
    )


def _listed_rows(
    launch: Launcher,
    case: AttentionCase,
    read: Entries,
    positions_T: torch.Tensor,
    sequence_T: torch.Tensor | None,
    selected_TK: torch.Tensor,
) -> torch.Tensor:
    """int32 [T, K], the rows that selected entries are read from, -1 where there is none."""
    rows_TK = torch.empty(selected_TK.shape, dtype=torch.int32, device=selected_TK.device)
    listed = selected_TK.shape[1]
    block = min(512, next_power_of_2(max(1, listed)))
    launch(
        list_rows,
        (len(rows_TK), cdiv(listed, block)),
        selected_TK,
        read.table,
        positions_T,
        sequence_T,
        rows_TK,
        listed,
        read.columns,
        read.table_stride,
        selected_TK.stride(0),
        RATIO=case.ratio,
        SEQUENCES=sequence_T is not None,
        TABLE=read.table is not None,
        BLOCK=block,
    )
    return rows_TK


def _plain(
    launch: Launcher,
    case: AttentionCase,
    tile: Tile,
    read: Entries,
    rows: Rows,
    sink_H: torch.Tensor | None,
    sequence_T: torch.Tensor | None,
    selected_TK: torch.Tensor | None,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor | None,
) -> None:
    q_THK, _, latents_ND, _ = rows
    selects = read.rows is not None and selected_TK is not None
    launch(
        prefill_plain,
        (len(q_THK) * cdiv(case.heads, tile.heads),),
        *rows,
        sink_H,
        read.rows,
        read.table,
        sequence_T,
        selected_TK,
        out_THD,
        lse_TH,
        case.heads,
        selected_TK.shape[1] if selects and selected_TK is not None else read.columns,
        0 if latents_ND is None else latents_ND.stride(0),
        0 if read.rows is None else read.rows.stride(0),
        read.table_stride,
        0 if selected_TK is None else selected_TK.stride(0),
        case.score_scale * math.log2(math.e),
        **_constants(launch, case, tile, read, rows, sink_H, sequence_T),
        SELECTED=selects,
        TABLE=read.table is not None,
        BD=max(16, next_power_of_2(case.width)),
        BX=max(16, next_power_of_2(case.rope_extra)),
        **format_constants(launch, read.coded, case.width),
        num_warps=tile.warps,
    )


def _constants(
    launch: Launcher,
    case: AttentionCase,
    tile: Tile,
    read: Entries,
    rows: Rows,
    sink_H: torch.Tensor | None,
    sequence_T: torch.Tensor | None,
) -> dict[str, Any]:
    """What both kernels are compiled with."""
    has_entries = read.rows is not None
    return {
        "M": tile.heads,
        "BN": tile.keys,
        "D": case.width,
        "EXTRA": case.rope_extra,
        "WINDOW": case.window if rows[2] is not None else 0,
        "RATIO": case.ratio if has_entries else 0,
        "SINK": sink_H is not None,
        "LSE": case.lse,
        "SEQUENCES": has_entries and sequence_T is not None,
        "UPCAST": launch.interpreted,
    }


def _copies(dtype: torch.dtype, *keys: torch.Tensor | None) -> bool:
    """Whether copies of 16 bytes read all rows, in the dtype of the queries."""
    return all(
        rows_ND.dtype == dtype
        and rows_ND.stride(1) == 1
        and rows_ND.stride(0) * rows_ND.element_size() % _COPY_BYTES == 0
        and (rows_ND.is_meta or rows_ND.data_ptr() % _COPY_BYTES == 0)
        for rows_ND in keys
        if rows_ND is not None
    )


BACKENDS = (Declared("attention.sparse_prefill", run, serves),)
