"""Weights into the L2 cache ahead of their product: programs that only ask, and end at once.

Newer GPUs take a whole piece with one instruction, which their copy engines cut into lines; older
ones take the line of one address, of which sectors may be left out: there every sector is asked
for. (PTX ISA: "cp.async.bulk.prefetch", "prefetch, prefetchu".)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher, cdiv
from metainfer.ops.prefetch import PrefetchCase

PIECE_BYTES = 4096
_SECTOR_BYTES = 32
_WARPS_OF_SECTORS = 4
# One program for so many multiprocessors: enough to ask faster than memory gives.
_PROCESSORS_A_PROGRAM = 2
_FIRST_WITH_BULK = (9, 0)
_FRACTION_BITS = 16

_PIECE = tl.constexpr(
    """{
    .reg .pred some;
    setp.ne.b32 some, $2, 0;
    @some cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, 0;
    }"""
)
_SECTOR = tl.constexpr(
    """{
    .reg .pred some;
    setp.ne.b32 some, $2, 0;
    @some prefetch.global.L2 [$1];
    mov.b32 $0, 0;
    }"""
)


@triton.jit
def unit_places(n, step, size, UNITS: tl.constexpr, UNIT: tl.constexpr):
    """Where the n-th unit begins, int64, and how many of its bytes are there, int32. A piece is
    UNITS units of UNIT bytes, and pieces lie `step` / 2^16 pieces apart."""
    piece = ((n // UNITS).to(tl.int64) * step) >> 16
    at = piece * (UNITS * UNIT) + n % UNITS * UNIT
    there = tl.minimum(tl.maximum(size - at, 0), UNIT).to(tl.int32)
    return at, there // 16 * 16


@triton.jit(do_not_specialize=["size", "units", "step"])
def prefetch_pieces(
    weight_ptr,
    size: tl.int64,
    units,
    step: tl.int64,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    THREADS: tl.constexpr,
    BULK: tl.constexpr,
    ASM: tl.constexpr,
):
    for first in range(tl.program_id(0) * THREADS, units, PROGRAMS * THREADS):
        n = first + tl.arange(0, THREADS)
        at, there = unit_places(n, step, size, UNITS, UNIT)
        there = tl.where(n < units, there, 0)
        address = weight_ptr + at
        if not ASM:  # the interpreter has no caches: what would be asked for is read
            tl.load(address, there > 0)
        elif BULK:
            tl.inline_asm_elementwise(
                _PIECE, "=r,l,r", [address.to(tl.int64), there], tl.int32, is_pure=False, pack=1
            )
        else:
            tl.inline_asm_elementwise(
                _SECTOR, "=r,l,r", [address.to(tl.int64), there], tl.int32, is_pure=False, pack=1
            )


def prefetch(launch: Launcher, case: PrefetchCase, weight_N: torch.Tensor) -> tuple[()]:
    bulk = launch.capability >= _FIRST_WITH_BULK
    pieces = cdiv(case.size, PIECE_BYTES)
    taken = min(pieces, case.taken // PIECE_BYTES) if case.taken < case.size else pieces
    unit = PIECE_BYTES if bulk else _SECTOR_BYTES
    units = taken * (PIECE_BYTES // unit)
    warps = 1 if bulk else _WARPS_OF_SECTORS
    programs = min(cdiv(units, 32 * warps), cdiv(launch.multiprocessors, _PROCESSORS_A_PROGRAM))
    launch(
        prefetch_pieces,
        (programs,),
        weight_N,
        case.size,
        units,
        (pieces << _FRACTION_BITS) // max(taken, 1),
        UNITS=PIECE_BYTES // unit,
        UNIT=unit,
        PROGRAMS=max(programs, 1),
        THREADS=32 * warps,
        BULK=bulk,
        ASM=not launch.interpreted,
        num_warps=warps,
    )
    return ()


BACKENDS = (Declared("weights.prefetch", prefetch),)
