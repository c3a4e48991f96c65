"""attention.sparse_decode in Triton.

Three kernels fulfil the contract; `tile_of` chooses from the case and the GPU alone:
    wgmma: 64 heads of a row, asynchronous products (sm_90; `decode_wgmma`).
    mma: keys of 512 or 512 + 64 channels in bf16 or bytes, 16 to 64 heads of a row, mma.sync
        (`decode_mma`).
    plain: everything else: other widths, fp32, caches of another dtype than the queries, and
        Triton's interpreter.

Keys of a row are split over programs where rows and heads alone are too few for the GPU; each
split leaves its result and log-sum-exp in a workspace, which a second kernel merges. Splits depend
on shapes and the number of multiprocessors alone, so a CUDA graph may hold both kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Variant
from metainfer.kernels.triton.attention_merge import merge_into
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.decode_mma import decode_mma
from metainfer.kernels.triton.decode_plain import decode_plain
from metainfer.kernels.triton.decode_wgmma import decode_wgmma
from metainfer.kernels.triton.key_rows import format_constants
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2, shared_limit
from metainfer.kernels.triton.prefill_plain import plain_tile, serves
from metainfer.ops.attention import DENSE, AttentionCase

# In keys, by the time that one takes: the start and end of a program, a merge, what each split adds
# to it, and what each row and head of a split does, which is written and read in fp32.
_START, _MERGE, _SPLIT, _PARTIAL = 100.0, 40.0, 4.0, 0.018

_GATHER_BYTES = 16
_FEW_ROWS, _NARROW_HEADS = 64, 16  # of a variant
_NARROW_SHARE = 2  # programs of blocks of 16 heads: of so many multiprocessors one at most


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds, and how.

    Attributes:
        kernel: "wgmma", "mma" or "plain".
        heads, keys: of a tile.
        resident: programs that a multiprocessor holds at a time.
        held, buffers, warps_m, step: as the constants of `decode_mma`.
        registers: of a thread at most; 0 for what the compiler takes.
    """

    kernel: str
    heads: int
    keys: int
    warps: int
    resident: int = 1
    held: int = 0
    buffers: int = 2
    warps_m: int = 1
    step: int = 64
    registers: int = 0


def tile_of(case: AttentionCase, capability: tuple[int, int]) -> Tile:
    """The tile for a GPU; measured where it could be, see lab/kernels/README.md."""
    if case.dtype != "bfloat16" or case.width != 512 or case.rope_extra not in (0, 64):
        return Tile("plain", *plain_tile(case, 16), 4)
    shared = shared_limit(capability)
    if case.heads <= 16:
        return Tile("mma", 16, 32, 4, resident=2 if shared > 200 * 1024 else 1)
    if case.heads > 32 and capability == (9, 0):
        return Tile("wgmma", 64, 64, 8)
    if case.heads > 32 and shared > 160 * 1024:
        return Tile("mma", 64, 32, 8, warps_m=4)
    return Tile("mma", 32, 32, 8, held=256, warps_m=2)


def narrow_tile_of(case: AttentionCase, capability: tuple[int, int]) -> Tile:
    """By blocks of 16 heads: four times as many programs as by blocks of 64, each of which waits
    for less. Two of them on a multiprocessor are no faster than one after the other."""
    tile = tile_of(case, capability)
    if tile.kernel == "plain" or tile.heads <= _NARROW_HEADS:
        return tile
    return replace(tile_of(replace(case, heads=_NARROW_HEADS), capability), resident=1)


def usual_tile_of(case: AttentionCase, rows: int, launch: Launcher) -> Tile:
    """Narrow where rows are few: one row of V4-Flash over its window took 5.4 us on an H200 in
    place of 12.0, 16 rows over 640 keys 20 in place of 30."""
    narrow = narrow_tile_of(case, launch.capability)
    programs = rows * cdiv(case.heads, narrow.heads)
    few = programs * _NARROW_SHARE <= launch.multiprocessors
    return narrow if few else tile_of(case, launch.capability)


def splits_of(programs: int, tiles: int, keys: int, places: int, partials: int = 0) -> int:
    """Into how many parts the keys of each of `programs` programs, `tiles` of `keys`, are split
    where `places` run at a time and a split leaves results of `partials` rows and heads: what
    takes least time when a program takes as long as its keys, and a bit."""

    def time(splits: int) -> float:
        waves = -(-programs * splits // places)
        merge = _MERGE + (_SPLIT + _PARTIAL * partials) * splits if splits > 1 else 0.0
        return waves * (_START + -(-tiles // splits) * keys) + merge

    return min(range(1, max(1, min(tiles, 4 * places)) + 1), key=time)


def run(
    launch: Launcher,
    case: AttentionCase,
    q_THK: torch.Tensor,
    ring: torch.Tensor | None,
    window_rows_TW: torch.Tensor | None,
    sink_H: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
    entry_rows_TK: torch.Tensor | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The op; `tile` and `splits` are chosen where none are given."""
    rows = len(q_THK)
    tile = tile or usual_tile_of(case, rows, launch)
    if launch.interpreted or not _gathers(case, ring, entries):
        tile = Tile("plain", *plain_tile(case, 16, ring, entries), 4)
    window_columns = 0 if window_rows_TW is None else window_rows_TW.shape[1]
    entry_columns = 0 if entry_rows_TK is None else entry_rows_TK.shape[1]
    blocks = cdiv(case.heads, tile.heads)
    if splits is None:
        tiles = cdiv(window_columns, tile.keys) + cdiv(entry_columns, tile.keys)
        places = launch.multiprocessors * tile.resident
        splits = splits_of(rows * blocks, tiles, tile.keys, places, rows * case.heads)
    out_THD = q_THK.new_empty(rows, case.heads, case.width)
    lse_TH = q_THK.new_empty(rows, case.heads, dtype=torch.float32) if case.lse else None
    part, part_lse = out_THD, lse_TH
    if splits > 1:
        part = q_THK.new_empty(splits, *out_THD.shape, dtype=torch.float32)
        part_lse = part.new_empty(part.shape[:-1])
    if not window_columns:
        ring, window_rows_TW = entries, entry_rows_TK
    elif not entry_columns:
        entries, entry_rows_TK = ring, window_rows_TW
    arguments = (
        q_THK.contiguous(),
        ring,
        window_rows_TW,
        sink_H,
        entries,
        entry_rows_TK,
        part,
        part_lse,
        rows,
        case.heads,
        window_columns,
        entry_columns,
        splits,
        0 if ring is None else ring.stride(0),
        0 if entries is None else entries.stride(0),
        0 if window_rows_TW is None else window_rows_TW.stride(0),
        0 if entry_rows_TK is None else entry_rows_TK.stride(0),
        case.score_scale * math.log2(math.e),
    )
    constants: dict[str, Any] = {
        "M": tile.heads,
        "BN": tile.keys,
        "D": case.width,
        "EXTRA": case.rope_extra,
        "WINDOW": window_columns > 0,
        "ENTRIES": entry_columns > 0 or not window_columns,
        "SINK": sink_H is not None,
        "LSE": part_lse is not None,
    }
    kernel: Any = decode_plain
    if tile.kernel != "plain":
        kernel = decode_wgmma
        apart = case.window_format != case.entry_format and window_columns > 0 < entry_columns
        constants.update(W_FORM=case.window_format, E_FORM=case.entry_format, APART=apart)
    if tile.kernel == "mma":
        kernel = decode_mma
        constants.update(
            HELD=tile.held,
            BUFFERS=tile.buffers,
            WARPS=tile.warps,
            WARPS_M=tile.warps_m,
            STEP=tile.step,
        )
        if tile.registers:
            constants["maxnreg"] = tile.registers
    elif tile.kernel == "plain":
        constants.update(
            BD=max(16, next_power_of_2(case.width)),
            BX=max(16, next_power_of_2(case.rope_extra)),
            UPCAST=launch.interpreted,
            **_format_constants(launch, case),
        )
    launch(kernel, (rows * blocks, splits), *arguments, num_warps=tile.warps, **constants)
    if part_lse is not None and splits > 1:
        merge_into(launch, part, part_lse, out_THD, lse_TH)
    return out_THD if lse_TH is None else (out_THD, lse_TH)


def _gathers(case: AttentionCase, ring: torch.Tensor | None, entries: torch.Tensor | None) -> bool:
    """Whether rows can be read 16 bytes at a time, numbers in the dtype of the queries."""
    for cache, row_format in ((ring, case.window_format), (entries, case.entry_format)):
        if cache is None:
            continue
        dtype = TORCH_DTYPES[case.dtype] if row_format == DENSE else torch.uint8
        if cache.dtype is not dtype or cache.stride(1) != 1:
            return False
        if cache.stride(0) * cache.element_size() % _GATHER_BYTES:
            return False
        if not cache.is_meta and cache.data_ptr() % _GATHER_BYTES:
            return False
    return True


def _format_constants(launch: Launcher, case: AttentionCase) -> dict[str, Any]:
    """How rows of the ring and of the entries are bytes."""
    window = format_constants(launch, case.window_format, case.width)
    entry = format_constants(launch, case.entry_format, case.width)
    constants = {f"W_{name}": value for name, value in window.items() if name != "FP8"}
    constants.update({f"E_{name}": value for name, value in entry.items() if name != "FP8"})
    return {**constants, "FP8": window["FP8"] or entry["FP8"]}


def run_narrow(
    launch: Launcher,
    case: AttentionCase,
    q_THK: torch.Tensor,
    ring: torch.Tensor | None,
    window_rows_TW: torch.Tensor | None,
    sink_H: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
    entry_rows_TK: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """By blocks of 16 heads, whatever there are of rows."""
    lists = ring, window_rows_TW, sink_H, entries, entry_rows_TK
    return run(launch, case, q_THK, *lists, narrow_tile_of(case, launch.capability))


BACKENDS = (
    Declared(
        "attention.sparse_decode", run, serves, variants={"narrow": Variant(run_narrow, _FEW_ROWS)}
    ),
)
