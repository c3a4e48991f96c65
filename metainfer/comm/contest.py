"""A contest: the ways to do an operation, each verified and then timed, at rising sizes.

A way whose payload arrives wrong is timed no more. Times are those of the slowest rank, and all
ranks are told the same.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from metainfer.comm.group import Group, sum_in_order
from metainfer.comm.host_memory import HostMemoryGroup
from metainfer.comm.payload import small_numbers
from metainfer.plan.wires import BLOCK, PLAIN

_LARGEST = 7.0  # of `small_numbers`
_COARSEST = 0.07  # of a number in 8 bits, relative to the largest of its block
_SAMPLE_S = 0.02
_MOST_CALLS = 64
_DTYPE = torch.bfloat16

OnPoint = Callable[["Point"], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to do an operation.

    Attributes:
        name: of the way, such as "two-shot".
        operation: one of `plan.routes.OPERATIONS`.
        run: on this rank's tensor, which may be overwritten.
        wire: one of `plan.wires.WIRES`.
        ordered: sums are those in the order of ranks, bit for bit.
    """

    name: str
    operation: str
    run: Callable[[torch.Tensor], torch.Tensor]
    wire: str = PLAIN
    ordered: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """What was found of a contender at a size.

    Attributes:
        name, operation, wire, ordered: as of `Contender`.
        bytes: of the tensor that each rank gives.
        seconds: of a call, of the slowest rank, a sample each; () where it was wrong.
        wrong: what was; "" for nothing.
    """

    name: str
    operation: str
    wire: str
    ordered: bool
    bytes: int
    seconds: tuple[float, ...]
    wrong: str


def contest(
    group: Group,
    contenders: Sequence[Contender],
    sizes: Sequence[int],
    samples: int,
    until_s: float,
    on_point: OnPoint = lambda point: None,
) -> list[Point]:
    """Every rank calls it with the same contenders; all get the same points.

    Sizes rise outside and contenders take turns inside, so that what is reached in time can be
    compared.

    Args:
        group: by which ranks agree; it is timed only where it is a contender too.
        sizes: bytes of the tensor that each rank gives, rounded up to whole rows.
        until_s: of the monotonic clock of rank 0; no size is begun behind it.
    """
    points: list[Point] = []
    bad: set[tuple[str, str]] = set()
    for number, size in enumerate(sizes):
        for contender in contenders:
            key = (contender.operation, contender.name)
            if group.broadcast(time.monotonic() > until_s):
                return points
            if key in bad:
                continue
            point = _point(group, contender, rounded_up(size, group.size), number, samples)
            if point.wrong:
                bad.add(key)
            points.append(point)
            on_point(point)
    return points


def rounded_up(size: int, ranks: int) -> int:
    """Bytes of the least tensor of so many that can be divided over ranks and into blocks."""
    row = ranks * BLOCK * _DTYPE.itemsize
    return max(-(-size // row), 1) * row


def _point(group: Group, contender: Contender, size: int, number: int, samples: int) -> Point:
    given = _given(size, group.rank, number)
    begun = time.perf_counter()
    wrong = _problem(group, contender, given, number)
    once_s = time.perf_counter() - begun
    seconds: tuple[float, ...] = ()
    if not wrong:
        slowest = group.broadcast(max(group.gather(once_s) or [0.0]))
        calls = max(1, min(_MOST_CALLS, round(_SAMPLE_S / max(slowest, 1e-6))))
        seconds = tuple(_sample(group, contender, given, calls) for _ in range(samples))
    return Point(
        contender.name, contender.operation, contender.wire, contender.ordered, size, seconds, wrong
    )


def _sample(group: Group, contender: Contender, given: torch.Tensor, calls: int) -> float:
    """Seconds of a call, of the slowest rank."""
    group.broadcast(None)  # all begin together
    begun = time.perf_counter()
    for _ in range(calls):
        contender.run(given)
    taken = (time.perf_counter() - begun) / calls
    return group.broadcast(max(group.gather(taken) or [0.0]))


def problem(
    group: Group, contender: Contender, size: int, number: int, device: torch.device
) -> str:
    """What is wrong with what a way brings of tensors of `size` bytes; "" for nothing. All ranks
    call it, and are told the same.

    Args:
        number: of the payload, for which any will do.
        device: of tensors.
    """
    given = _given(rounded_up(size, group.size), group.rank, number)
    return _problem(group, contender, given.to(device), number)


def _given(size: int, rank: int, number: int) -> torch.Tensor:
    """bf16 [rows, 128]."""
    return small_numbers(size // _DTYPE.itemsize, rank, number, "cpu").view(-1, BLOCK)


def _problem(group: Group, contender: Contender, given: torch.Tensor, number: int) -> str:
    """What was wrong with what arrived, on the first rank where something was; "" for nothing."""
    found = contender.run(given.clone()).cpu()
    why = _difference(group, contender, given, number, found)
    told = group.gather((why, zlib.crc32(found.contiguous().view(torch.uint8).numpy().tobytes())))
    verdict = ""
    if told:
        verdict = next((text for text, _ in told if text), "")
        same = contender.operation in ("all_reduce", "all_gather")
        if not verdict and same and len({mark for _, mark in told}) > 1:
            verdict = "ranks have different bits"
    return group.broadcast(verdict)


def _difference(
    group: Group, contender: Contender, given: torch.Tensor, number: int, found: torch.Tensor
) -> str:
    wanted = _wanted(group, contender.operation, given, number)
    if found.shape != wanted.shape:
        return f"rank {group.rank} got {list(found.shape)} for {list(wanted.shape)}"
    error = (found.float() - wanted.float()).abs()
    allowed = 0.0
    if contender.wire != PLAIN:  # what each rank rounds, and the sum
        allowed = 2 * group.size * _LARGEST * _COARSEST
    wrong = int((error > allowed).sum())
    if wrong or not bool(found.isfinite().all()):
        return f"{wrong} of {found.numel()} numbers of rank {group.rank} are wrong"
    return ""


def _wanted(group: Group, operation: str, given: torch.Tensor, number: int) -> torch.Tensor:
    parts = [_given(given.nbytes, rank, number) for rank in range(group.size)]
    if operation == "all_gather":
        return torch.cat(parts)
    rows = len(given) // group.size
    own = slice(group.rank * rows, (group.rank + 1) * rows)
    if operation == "all_to_all":
        return torch.cat([part[own] for part in parts])
    total = sum_in_order(parts)
    return total if operation == "all_reduce" else total[own]


def floor_links(operation: str, size: int, ranks: int) -> float:
    """Bytes that each rank has to read of others, at least, where each gives `size`."""
    others = (ranks - 1) / ranks
    if operation == "all_gather":
        return (ranks - 1) * size
    return size * others * (2 if operation == "all_reduce" else 1)


@dataclass(frozen=True, slots=True)
class Links:
    """What the floor is made of, with all ranks busy.

    Attributes:
        flag_s: until each rank knows that all others have come.
        bytes_per_s: at which each rank copies out of another's memory.
    """

    flag_s: float
    bytes_per_s: float

    def floor_s(self, operation: str, size: int, ranks: int) -> float:
        return self.flag_s + floor_links(operation, size, ranks) / self.bytes_per_s


def measure_links(group: HostMemoryGroup, copied: int = 2**21, samples: int = 5) -> Links:
    """Of shared memory, each the best of some samples of the slowest rank."""
    flags, copies = [], []
    source, target = group.neighbour(copied), torch.empty(copied, dtype=torch.uint8)
    for _ in range(samples):
        group.broadcast(None)
        begun = time.perf_counter()
        for _ in range(_MOST_CALLS):
            group.meet()
        flags.append((time.perf_counter() - begun) / _MOST_CALLS)
        begun = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        copies.append((time.perf_counter() - begun) / 8)
    slowest = group.gather((min(flags), min(copies)))
    flag_s, copy_s = (max(ones) for ones in zip(*slowest, strict=True)) if slowest else (0.0, 1.0)
    return Links(*group.broadcast((flag_s, copied / copy_s)))
