"""What ways would take on a machine whose links were measured (`probe --measure`), before any rank
is started. Of the transfers as each algorithm makes them, without the time of sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from metainfer.hardware.curves import (
    ALL_TO_ALL,
    COPY,
    LOAD,
    NCCL,
    RING,
    STAGED,
    STORE,
    Curve,
    trusted,
)
from metainfer.plan.routes import DECODE, PREFILL, SUMS, Rival

NCCL_SUMMED = f"{NCCL}, summed here"
ONE_KERNEL = "one kernel"
ONE_KERNEL_BYTES = 256 * 1024
"""Of the largest sum that one kernel makes, which a graph of decode may hold."""

GATHERED_UP_TO_BYTES = 64 * 1024
"""Of a tensor that a library gathers whole, so that each rank sums all of it."""

_BY_KERNELS = (STORE, LOAD)
_BY_HOST = (LOAD, COPY, STAGED)  # rounds that the host counts, which no graph may hold
_LEAST_BYTES, _MOST_BYTES, _GROWTH = 1024, 64 * 2**20, 4


def sizes() -> tuple[int, ...]:
    """Bytes at which ways are compared, rising."""
    found = [_LEAST_BYTES]
    while found[-1] < _MOST_BYTES:
        found.append(found[-1] * _GROWTH)
    return tuple(found)


def foretold(
    curves: Sequence[Curve], gpus: Sequence[int], operation: str, sent: float = 1.0
) -> list[Rival]:
    """Ways of an operation, from curves that were measured with just these GPUs at the same time.

    Args:
        sent: bytes that travel for each of a tensor's; not 1 where sums travel in 8 bits, which
            NCCL does not add up.
    """
    known = {
        (c.means, c.operation): c
        for c in reversed(trusted(curves))
        if c.at_once and set(c.gpus) == set(gpus)
    }
    found = list(_by_nccl(known, operation, len(gpus), sent))
    # What two GPUs send to all others they send to the next.
    pattern = RING if len(gpus) == 2 else ALL_TO_ALL
    for means in (STORE, LOAD, COPY, STAGED):
        links = known.get((means, pattern))
        if links is None:
            continue
        if means in _BY_KERNELS and operation == "all_reduce" and sent == 1.0:
            few = tuple(size for size in sizes() if size <= ONE_KERNEL_BYTES)
            times = [links.seconds_of((len(gpus) - 1) * size) for size in few]
            found.append(Rival(f"{ONE_KERNEL} by {means}", few, tuple(times), (DECODE,)))
        if means in _BY_HOST:
            for name, rounds in _rounds(operation, len(gpus)).items():
                times = [
                    sum(links.seconds_of(part * sent * size) for part in rounds) for size in sizes()
                ]
                found.append(Rival(f"{name} by {means}", sizes(), tuple(times), (PREFILL,)))
    return found


def _by_nccl(
    known: dict[tuple[str, str], Curve], operation: str, count: int, sent: float
) -> Iterator[Rival]:
    """As it comes; and with its transfers alone, where sums are made in the order of ranks."""
    own, gather = known.get((NCCL, operation)), known.get((NCCL, "all_gather"))
    # Two numbers have one order.
    ordered = operation in ("all_gather", "all_to_all") or count == 2
    if own is not None and sent == 1.0:
        times = tuple(own.seconds_of(size) for size in sizes())
        yield Rival(NCCL, sizes(), times, ordered=ordered)
    # Ranks send each other parts to sum: as many bytes as where NCCL sums them on its way.
    parts = known.get((NCCL, "reduce_scatter"))
    if parts is None or gather is None or operation not in SUMS:
        return
    summed = []
    for size in sizes():
        if operation == "reduce_scatter":
            summed.append(parts.seconds_of(sent * size))
        elif size <= GATHERED_UP_TO_BYTES:
            summed.append(gather.seconds_of(sent * size))
        else:
            summed.append(parts.seconds_of(sent * size) + gather.seconds_of(sent * size / count))
    yield Rival(NCCL_SUMMED, sizes(), tuple(summed))


def _rounds(operation: str, count: int) -> dict[str, tuple[float, ...]]:
    """Algorithm -> bytes that each GPU sends in each round, of each byte that it gives."""
    others = count - 1
    if operation == "all_reduce":
        return {"one-shot": (others,), "two-shot": (others / count, others / count)}
    return {"direct": (others if operation == "all_gather" else others / count,)}
