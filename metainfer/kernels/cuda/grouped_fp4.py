"""moe.experts_fp8_rows on sm_90 with fp4 weights, by its own matrix instructions (grouped_fp4.cu).

Weights are kept in the order in which threads want them, without loss and in as many bytes, and one
factor a row: numbers of a row become e4m3 codes, which hold them exactly, times that factor (see
`triton.moe_weights.folded`). Where that cannot be, or the rows are not in groups of 128, Triton's
kernels do the call.

A piece is 128 rows of weights (of gate and up eight rows of each in turn) by 128 columns: twice 64
rows, each 4,096 bytes of numbers and 256 of shifts. Rows r and r + 8 of 16 and a group of 32
columns belong to one thread of 128: two bytes of shifts, and two vectors of four words. A word is
eight numbers of one row, in the order of the columns. Magnitudes are in their order in the low
three bits of the nibbles; the highest bit of the odd nibbles is the sign of the first four numbers,
that of the even ones of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from metainfer.kernels.gpu.program import CudaKernel, compiler
from metainfer.kernels.registry import YES, Verdict, no
from metainfer.kernels.triton import moe, moe_rows
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher, shared_limit
from metainfer.kernels.triton.moe_order import Order, order
from metainfer.kernels.triton.moe_records import record_words, records
from metainfer.kernels.triton.moe_weights import Experts, cannot_fold, folded
from metainfer.ops.base import Target
from metainfer.ops.moe import ExpertsFp8RowsCase, SwigluFp8Case

KERNEL = CudaKernel("grouped_fp4", threads=384, folder=Path(__file__).parent)
CAPABILITY = (9, 0)

_SIDE = 128  # of a piece
_GROUP = 32  # columns of a weight that share a scale
_SPAN = 11  # of the shifts that e4m3 holds without subnormal numbers
_ELEMENTS_AT_A_TIME = 2**27
_MOST_STAGES = 12
_FEW = 32  # slots of tiles of which two share a multiprocessor
_OUT_STRIDE = 2 * _SIDE + 16
_WEIGHT_BYTES = 8704  # of a step
_KILOBYTE = 1024  # stages are whole ones, and begin at one

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Attributes:
    codes: uint8 [E, blocks of 128 rows, columns / 128, 2, 4352].
    factors: fp32 [E, blocks of 128 rows, 128].
    """

    codes: torch.Tensor
    factors: torch.Tensor


@dataclass(frozen=True, slots=True)
class Repacked:
    """Weights for this kernel: gate with up, and down."""

    gate_up: Pieces
    down: Pieces


def eligible(case: ExpertsFp8RowsCase, target: Target) -> Verdict:
    if target.type != "cuda" or target.capability != CAPABILITY:
        return no("is written with instructions that sm_90 alone has")
    if case.weight_format != "fp4_group":
        return no(f"unpacks fp4 weights, not {case.weight_format}")
    if case.group != _SIDE or case.scale != "e8m0" or case.dtype != "bfloat16":
        return no("takes rows in groups of 128 channels with e8m0 scales, and bfloat16 inside")
    if case.width % _SIDE or case.inner % _SIDE:
        return no(f"takes widths by {_SIDE}, not {case.width} and {case.inner}")
    library = compiler()
    return no(library) if isinstance(library, str) else YES


def prepare(case: ExpertsFp8RowsCase, w1: Tensors, w2: Tensors, w3: Tensors) -> Repacked | Experts:
    if any(cannot_fold(scale) for _, scale in (w1, w2, w3)):
        return moe.prepare_fp8_rows(case, w1, w2, w3)
    return Repacked(pieces(w1, w3), pieces(w2))


def pieces(*matrices: Tensors) -> Pieces:
    """Pieces of one matrix, or of two whose rows take turns by eight.

    Args:
        matrices: packed uint8 [E, N, C / 2] (the even column low) and e8m0 uint8 [E, N, C / 32].
    """
    first, _ = matrices[0]
    experts, rows, columns = first.shape[0], first.shape[1] * len(matrices), 2 * first.shape[2]
    blocks, steps = rows // _SIDE, columns // _SIDE
    codes = first.new_empty(experts, blocks, steps, 2, 4352)
    factors = first.new_empty(experts, blocks, _SIDE, dtype=torch.float32)
    at_a_time = max(1, _ELEMENTS_AT_A_TIME // (rows * columns))
    for begin in range(0, experts, at_a_time):
        part = slice(begin, begin + at_a_time)
        numbers = torch.stack([_nibbles(packed[part]) for packed, _ in matrices])
        kept = [folded(scale[part]) for _, scale in matrices]
        shifts = torch.stack([_SPAN - (added >> 3) for added, _ in kept])
        codes[part, ..., :4096] = _words(_in_turns(numbers), blocks, steps)
        codes[part, ..., 4096:] = _shifts(_in_turns(shifts), blocks, steps)
        scale_of = torch.stack([factor for _, factor in kept]).unsqueeze(-1)
        factors[part] = _in_turns(scale_of).view(-1, blocks, _SIDE)
    return Pieces(codes, factors)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[E, N, C / 2] -> [E, N, C]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def _in_turns(x: torch.Tensor) -> torch.Tensor:
    """[matrices, E, N, C] -> [E, matrices N, C], eight rows of each in turn."""
    return x.unflatten(2, (-1, 8)).permute(1, 2, 0, 3, 4).flatten(1, 3)


def _words(numbers: torch.Tensor, blocks: int, steps: int) -> torch.Tensor:
    """[E, N, C] of four bits -> bytes [E, blocks, steps, 2, 4096]."""
    # Rows: halves of a block, warps, two runs of eight. Columns: steps, four threads, two vectors,
    # two words of them, two fours of numbers.
    split = numbers.view(-1, blocks, 2, 4, 2, 8, steps, 4, 2, 2, 2, 4)
    split = split.permute(0, 1, 6, 2, 8, 3, 5, 7, 9, 4, 10, 11)
    magnitudes = (split & 7).flatten(-2)
    # Sign of the first four numbers in the odd nibbles, of the others in the even ones.
    signs = (split & 8).flip(-2).transpose(-1, -2).flatten(-2)
    nibbles = magnitudes | signs
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).reshape(-1, blocks, steps, 2, 4096)


def _shifts(shifts: torch.Tensor, blocks: int, steps: int) -> torch.Tensor:
    """[E, N, C / 32] -> bytes [E, blocks, steps, 2, 256]."""
    split = shifts.view(-1, blocks, 2, 4, 2, 8, steps, _SIDE // _GROUP)
    return split.permute(0, 1, 6, 2, 3, 5, 7, 4).reshape(-1, blocks, steps, 2, 256)


def experts_fp8_rows(
    launch: Launcher,
    case: ExpertsFp8RowsCase,
    weights: Repacked | Experts,
    codes_TD: torch.Tensor,
    scales_TG: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    if isinstance(weights, Experts):
        return moe.experts_fp8_rows(launch, case, weights, codes_TD, scales_TG, ids_TK, weights_TK)
    if not _copies_by_words(codes_TD):
        codes_TD = codes_TD.clone(memory_format=torch.contiguous_format)
    ids_TK, scales_TG = ids_TK.contiguous(), scales_TG.contiguous()
    slots, height = ids_TK.numel(), height_of(case, len(ids_TK))
    placed = order(launch, ids_TK, case.experts, height)
    product = partial(_product, launch, case, placed, height)
    hidden: tuple[torch.Tensor, torch.Tensor | None]
    if height <= _FEW:
        numbers = codes_TD.new_empty(slots, case.inner, dtype=torch.bfloat16)
        product(weights.gate_up, (codes_TD, scales_TG), None, numbers)
        coded = SwigluFp8Case(case.inner, case.limit, case.group, case.scale, case.dtype)
        hidden = moe_rows.coded(launch, coded, numbers, False)
    else:
        rows = records(launch, codes_TD, scales_TG, placed, case.selected, height)
        shape = placed.tiles, case.inner // _SIDE, record_words(height)
        hidden = codes_TD.new_empty(shape, dtype=torch.int32), None
        product(weights.gate_up, (rows, None), None, hidden[0])
    parts = codes_TD.new_empty(slots, case.width, dtype=torch.bfloat16)
    product(weights.down, hidden, weights_TK.contiguous(), parts)
    return moe_rows.added(launch, case.experts, ids_TK, parts)


def _copies_by_words(codes: torch.Tensor) -> bool:
    return codes.is_meta or (codes.data_ptr() % 16 == 0 and codes.stride(0) % 16 == 0)


def height_of(case: ExpertsFp8RowsCase, rows: int) -> int:
    """Slots of a tile where `rows` rows choose evenly, from times on an H200."""
    each = rows * case.selected / case.experts
    for height, most in ((16, 8), (64, 56)):
        if each <= most:
            return height
    return 128


def stages_of(columns: int, height: int, limit: int) -> tuple[int, int]:
    """(stages of the ring, bytes of shared memory): PLACE_* in the source. Low tiles leave room for
    a second block."""
    is_few = height <= _FEW
    if is_few:
        limit = limit // 2 - _KILOBYTE
    barriers = 32 * _MOST_STAGES + 16
    scales = 4 * (columns // _SIDE) * height if is_few else 0
    fixed = height * (_OUT_STRIDE + 4) + scales + barriers
    stage = -(-(4 * record_words(height) + _WEIGHT_BYTES) // _KILOBYTE) * _KILOBYTE
    stages = min(_MOST_STAGES, (limit - _KILOBYTE - fixed) // stage)
    return stages, stages * stage + fixed


def _product(
    launch: Launcher,
    case: ExpertsFp8RowsCase,
    placed: Order,
    height: int,
    weights: Pieces,
    rows: tuple[torch.Tensor, torch.Tensor | None],
    shares: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Gate and up where there are no shares, down where there are."""
    gated = shares is None
    columns, width = (case.width, case.inner) if gated else (case.inner, case.width)
    stages, shared = stages_of(columns, height, shared_limit(launch.capability))
    few = height <= _FEW
    items = placed.tiles * (width // (_SIDE // 2 if gated and few else _SIDE))
    blocks = launch.multiprocessors * (2 if few else 1)
    launch.cuda(
        KERNEL,
        (min(items, blocks), 1, 1),
        *rows,
        weights.codes,
        weights.factors,
        placed.slots,
        placed.experts,
        shares,
        out,
        placed.tiles,
        rows[0].stride(0),
        case.experts,
        float(case.limit),
        shared_bytes=shared,
        GATED=int(gated),
        COLUMNS=columns,
        WIDTH=width,
        BM=height,
        PER=case.selected if gated else 1,
        STAGES=stages,
    )


BACKENDS = (Declared("moe.experts_fp8_rows", experts_fp8_rows, eligible, prepare, name="cuda"),)
