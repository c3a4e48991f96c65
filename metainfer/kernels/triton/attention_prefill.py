"""attention.sparse_prefill in Triton.

Three kernels fulfil the contract. Where one can, it is chosen by `tile_of` from the case and the
GPU alone:
    wgmma: 64 heads of a row, asynchronous products (sm_90).
    mma: 16 to 64 heads of a row, mma.sync, fitted to the GPU's shared memory.
    plain: everything else: other widths, fp32, rows that 16-byte copies cannot read, and Triton's
        interpreter.

The first two read keys in the dtype of the queries. Entries that are kept as bytes are decoded
once before them, into memory of at most `MOST_DECODED_BYTES`: a chunk of prefill looks at each
entry many times over. Where that is not enough, the plain kernel decodes in registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.key_rows import decoded, format_constants
from metainfer.kernels.triton.launch import Launcher, shared_limit
from metainfer.kernels.triton.prefill_late import prefill_late
from metainfer.kernels.triton.prefill_mma import prefill_mma
from metainfer.kernels.triton.prefill_plain import prefill_plain
from metainfer.kernels.triton.prefill_wgmma import prefill_wgmma
from metainfer.ops.attention import DENSE, AttentionCase

MOST_DECODED_BYTES = 5 * 2**28
"""1.25 GiB: what the entries of a million tokens of V3.2 or GLM-5 take."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_COPY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds, and how.

    Attributes:
        kernel: "wgmma", "late" (its order of products another), "mma" or "plain".
        heads, keys: of a tile.
        held, buffers, warps_m, step, split: as the constants of `prefill_mma`.
    """

    kernel: str
    heads: int
    keys: int
    warps: int
    held: int = 0
    buffers: int = 2
    warps_m: int = 1
    step: int = 64
    split: bool = True


def tile_of(  # noqa: PLR0911 (a table)
    case: AttentionCase, capability: tuple[int, int]
) -> Tile:
    """The tile for a GPU; measured where it could be, see lab/kernels/README.md."""
    if case.dtype != "bfloat16" or case.width != 512 or case.rope_extra not in (0, 64):
        return plain_tile(case)
    if case.heads <= 16:
        return Tile("mma", 16, 32, 4, warps_m=1)
    if case.heads <= 32:
        return Tile("mma", 32, 32, 8, held=512, warps_m=2)
    if capability == (9, 0):
        return Tile("wgmma", 64, 64, 8)
    if shared_limit(capability) >= 160 * 1024:
        return Tile("mma", 64, 32, 8, warps_m=4)
    if case.rope_extra:
        return Tile("mma", 32, 32, 8, held=512, warps_m=2)
    return Tile("mma", 64, 32, 8, held=320, warps_m=4)


def plain_tile(case: AttentionCase) -> Tile:
    """For the plain kernel, small enough for every GPU."""
    heads = 16 if case.heads <= 16 else 32
    return Tile("plain", heads, 16 if case.dtype == "float32" else 32, 8)


@dataclass(frozen=True, slots=True)
class Keys:
    """What rows look at: tensors and how to read them.

    Attributes:
        entries: cache rows; bytes where `coded` names a format.
        table: cache rows by sequence and number, or None where each sequence's lie in order.
        columns: of the list of a row, or of the table.
    """

    entries: torch.Tensor | None
    table: torch.Tensor | None
    table_stride: int
    columns: int
    coded: str = DENSE


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
    if launch.interpreted or not _copies(case, latents_ND, entries):
        tile = plain_tile(case)
    keys = _keys(launch, case, tile, positions_T, entries, entry_rows_BE, sequence_T, selected_TK)
    if keys.coded != DENSE:
        tile = plain_tile(case)
    has_entries = keys.entries is not None
    arguments = (
        q_THK.contiguous(),
        positions_T,
        latents_ND,
        latent_rows_T,
        sink_H,
        keys.entries,
        keys.table,
        sequence_T,
        selected_TK,
        out_THD,
        lse_TH,
        case.heads,
        keys.columns,
        0 if latents_ND is None else latents_ND.stride(0),
        0 if keys.entries is None else keys.entries.stride(0),
        keys.table_stride,
        0 if selected_TK is None else selected_TK.stride(0),
        case.score_scale * math.log2(math.e),
    )
    constants: dict[str, Any] = {
        "M": tile.heads,
        "BN": tile.keys,
        "D": case.width,
        "EXTRA": case.rope_extra,
        "WINDOW": case.window if latents_ND is not None else 0,
        "RATIO": case.ratio if has_entries else 0,
        "SELECTED": has_entries and selected_TK is not None,
        "SINK": sink_H is not None,
        "LSE": case.lse,
        "SEQUENCES": has_entries and sequence_T is not None,
        "TABLE": keys.table is not None,
    }
    grid = (rows * triton.cdiv(case.heads, tile.heads),)
    kernel: Any = prefill_late if tile.kernel == "late" else prefill_wgmma
    if tile.kernel == "mma":
        kernel = prefill_mma
        constants.update(
            HELD=tile.held,
            BUFFERS=tile.buffers,
            WARPS=tile.warps,
            WARPS_M=tile.warps_m,
            STEP=tile.step,
            SPLIT=tile.split,
        )
    elif tile.kernel == "plain":
        kernel = prefill_plain
        constants.update(
            BD=max(16, triton.next_power_of_2(case.width)),
            BX=max(16, triton.next_power_of_2(case.rope_extra)),
            UPCAST=launch.interpreted,
            **format_constants(launch, keys.coded, case.width),
        )
    launch(kernel, grid, *arguments, num_warps=tile.warps, **constants)
    return out_THD if lse_TH is None else (out_THD, lse_TH)


def _copies(
    case: AttentionCase, latents_ND: torch.Tensor | None, entries: torch.Tensor | None
) -> bool:
    """Whether copies of 16 bytes read all rows, in the dtype of the queries."""
    tensors = [latents_ND] if latents_ND is not None else []
    if entries is not None:
        if case.entry_format == DENSE:
            tensors.append(entries)
        elif entries.stride(0) % _COPY_BYTES or entries.stride(1) != 1:
            return False
    return all(
        tensor.dtype == _DTYPES[case.dtype]
        and tensor.stride(1) == 1
        and tensor.stride(0) * tensor.element_size() % _COPY_BYTES == 0
        and (tensor.is_meta or tensor.data_ptr() % _COPY_BYTES == 0)
        for tensor in tensors
    )


def _keys(
    launch: Launcher,
    case: AttentionCase,
    tile: Tile,
    positions_T: torch.Tensor,
    entries: torch.Tensor | None,
    entry_rows_BE: torch.Tensor | None,
    sequence_T: torch.Tensor | None,
    selected_TK: torch.Tensor | None,
) -> Keys:
    """What the kernel of `tile` reads entries from."""
    if entries is None or entry_rows_BE is None or not entry_rows_BE.numel():
        return Keys(None, None, 0, 0)
    sequences, table_columns = entry_rows_BE.shape
    columns = table_columns if selected_TK is None else selected_TK.shape[1]
    read = Keys(entries, entry_rows_BE, entry_rows_BE.stride(0), columns, case.entry_format)
    if case.entry_format == DENSE or tile.kernel == "plain":
        return read
    if 2 * case.key_width * sequences * table_columns > MOST_DECODED_BYTES or not len(positions_T):
        return read
    seen_T = ((positions_T + 1) // case.ratio).clamp(max=table_columns)
    if sequence_T is None:
        seen_B = seen_T.amax(0, keepdim=True)
    else:
        seen_B = seen_T.new_zeros(sequences).scatter_reduce_(0, sequence_T, seen_T, "amax")
    numbers = decoded(
        launch, case.entry_format, entries, entry_rows_BE, seen_B, case.width, case.rope_extra
    )
    return Keys(numbers, None, table_columns, columns)


BACKENDS = (Declared("attention.sparse_prefill", run),)
