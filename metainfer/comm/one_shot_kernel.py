"""One-shot sums in one kernel, for rows of decode: right in graphs, however often replayed.

A round is counted in the memory of each GPU, by the kernel itself. Program n writes its part of a
half of an area, tells program n of every peer by a flag in the peer's memory, and sums when it has
been told by all. Halves take turns, and no barrier ends a round: a half is written again two rounds
later, behind a kernel in which every peer said that it had begun the round between, and so had
ended the one before. All programs must be resident, hence `MOST_PROGRAMS`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.comm.move_kernel import Address
from metainfer.kernels.triton.launch import Launcher

MOST_PROGRAMS = 64
MOST_RANKS = 16
_STATE_AT = 4 * MOST_PROGRAMS * MOST_RANKS  # bytes of flags, behind which the state lies
COUNTER, TICKETS, ABORT, LATE = range(4)
"""Words of the state: rounds done; programs that have ended; not 0 to stop waiting; 1 + the rank
that did not come."""
DATA_AT = _STATE_AT + 256
_BLOCK = 1024
_WARPS = 4

_SIGNAL: tl.constexpr = tl.constexpr("st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;")
_LOOK: tl.constexpr = tl.constexpr("ld.acquire.sys.global.u32 $0, [$1];")


def state_at(word: int) -> int:
    """Byte of an area at which a word of the state lies."""
    return _STATE_AT + 4 * word


def area_bytes(size: int, slot_bytes: int) -> int:
    """Of `size` ranks that sum up to `slot_bytes` each."""
    return DATA_AT + 2 * size * slot_bytes


@triton.jit
def _signal(flag, number, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a flag behind all that this program wrote before a barrier."""
    if ASM:
        tl.inline_asm_elementwise(
            _SIGNAL, "=r,l,r", [flag.to(tl.int64), number], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(flag, number)


@triton.jit
def _look(flag, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A flag, before all that this program reads behind a barrier."""
    if ASM:
        return tl.inline_asm_elementwise(
            _LOOK, "=r,l", [flag.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )
    return tl.load(flag)


@triton.jit
def _write_part(  # type: ignore[no-untyped-def]
    partial, areas, half, slot, count, RANK: tl.constexpr, SIZE: tl.constexpr, PUSH: tl.constexpr,
    DATA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's blocks, into every peer's area (PUSH) or into this rank's."""
    kind: tl.constexpr = tl.pointer_type(partial.dtype.element_ty)
    for begin in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places < count
        values = tl.load(partial + places, mask=inside)
        for rank in tl.static_range(SIZE):
            if (rank == RANK) != PUSH:
                target = (tl.load(areas + rank) + DATA).to(kind) + half + RANK * slot
                tl.store(target + places, values, mask=inside)


@triton.jit
def _meet(  # type: ignore[no-untyped-def]
    areas, state, number, longest, RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Until the programs of this number have written their parts on all ranks."""
    program = tl.program_id(0)
    tl.debug_barrier()
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flags = tl.load(areas + rank).to(tl.pointer_type(tl.int32))
            _signal(flags + RANK * PROGRAMS + program, number, ASM)
    own_flags = tl.load(areas + RANK).to(tl.pointer_type(tl.int32))
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flag = own_flags + rank * PROGRAMS + program
            seen = _look(flag, ASM)
            looks = 0
            while (seen < number) & (looks < longest):
                seen = _look(flag, ASM)
                stopped = tl.load(state + 2, volatile=True)
                looks = tl.where(stopped != 0, longest, looks + 1)
            if seen < number:
                tl.store(state + 3, rank + 1)
    tl.debug_barrier()


@triton.jit
def one_shot_sum(  # type: ignore[no-untyped-def]
    partial, total, areas, count, slot, longest, RANK: tl.constexpr, SIZE: tl.constexpr,
    PUSH: tl.constexpr, STATE: tl.constexpr, DATA: tl.constexpr, PROGRAMS: tl.constexpr,
    ASM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over ranks of [count] numbers, in fp32 in the order of ranks.

    Args:
        areas: int64 [SIZE], where each rank's area begins.
        slot: numbers that an area has room for, of each rank in each half.
        longest: looks at a flag, after which a rank is late.
    """
    state = (tl.load(areas + RANK) + STATE).to(tl.pointer_type(tl.int32))
    number = tl.load(state, volatile=True) + 1
    half = (number & 1).to(tl.int64) * SIZE * slot
    _write_part(partial, areas, half, slot, count, RANK, SIZE, PUSH, DATA, BLOCK)
    _meet(areas, state, number, longest, RANK, SIZE, PROGRAMS, ASM)
    kind: tl.constexpr = tl.pointer_type(partial.dtype.element_ty)
    for begin in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places < count
        summed = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                values = tl.load(partial + places, mask=inside)
            else:
                where = RANK if PUSH else rank
                source = (tl.load(areas + where) + DATA).to(kind) + half + rank * slot
                values = tl.load(source + places, mask=inside, volatile=True)
            # The first is taken, not added to 0, which would lose the sign of -0.
            summed = values.to(tl.float32) if rank == 0 else summed + values.to(tl.float32)
        tl.store(total + places, summed.to(partial.dtype.element_ty), mask=inside)
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, number)


def start_one_shot(
    launch: Launcher,
    partial: torch.Tensor,
    total: torch.Tensor,
    areas: torch.Tensor | Address,
    rank: int,
    size: int,
    slot_bytes: int,
    *,
    push: bool,
    longest: int,
) -> None:
    """Queue the sum of `partial` (flat, bf16 or fp32) over ranks into `total`, which may be it.

    Args:
        areas: int64 [size].
        slot_bytes: of each rank in each half; `partial` is no larger.
        push: parts are written into every peer's area, else each reads those of its peers.
        longest: looks at a flag, after which the sum is wrong and the state says who was late.
    """
    count = partial.numel()
    programs = min(triton.cdiv(count, _BLOCK), MOST_PROGRAMS, launch.multiprocessors)
    launch(
        one_shot_sum,
        (programs,),
        partial,
        total,
        areas,
        count,
        slot_bytes // partial.element_size(),
        longest,
        num_warps=_WARPS,
        RANK=rank,
        SIZE=size,
        PUSH=push,
        STATE=_STATE_AT,
        DATA=DATA_AT,
        PROGRAMS=MOST_PROGRAMS,
        ASM=not launch.interpreted,
        BLOCK=_BLOCK,
    )
