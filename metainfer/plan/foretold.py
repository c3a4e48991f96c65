"""What ways would take on a machine whose links were measured (`probe --measure`), before any rank
is started."""

from __future__ import annotations

from collections.abc import Sequence

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
from metainfer.plan.routes import PHASES, PREFILL, Rival

_BY_KERNELS = (STORE, LOAD)  # which a graph of decode holds; copies are started by the host


def foretold(
    curves: Sequence[Curve], gpus: Sequence[int], operation: str, sizes: Sequence[int]
) -> list[Rival]:
    """Ways of an operation, from curves that were measured with just these GPUs at the same time:
    transfers as each algorithm makes them, without the time of sums; and NCCL as measured."""
    known = [c for c in trusted(curves) if c.at_once and set(c.gpus) == set(gpus)]
    found = []
    for curve in known:
        if curve.means == NCCL and curve.operation == operation:
            ordered = operation in ("all_gather", "all_to_all")
            found.append(_rival(NCCL, sizes, [curve.seconds_of(s) for s in sizes], ordered=ordered))
    # What two GPUs send to all others they send to the next.
    pattern = RING if len(gpus) == 2 else ALL_TO_ALL
    for means in (STORE, LOAD, COPY, STAGED):
        links = next((c for c in known if (c.means, c.operation) == (means, pattern)), None)
        if links is None:
            continue
        phases = PHASES if means in _BY_KERNELS else (PREFILL,)
        for name, rounds in _rounds(operation, len(gpus)).items():
            times = [sum(links.seconds_of(part * size) for part in rounds) for size in sizes]
            found.append(_rival(f"{name} by {means}", sizes, times, phases=phases))
    return found


def _rounds(operation: str, count: int) -> dict[str, tuple[float, ...]]:
    """Algorithm -> bytes that each GPU sends in each round, of each byte that it gives."""
    others = count - 1
    if operation == "all_reduce":
        return {"one-shot": (others,), "two-shot": (others / count, others / count)}
    return {"direct": (others if operation == "all_gather" else others / count,)}


def _rival(
    name: str,
    sizes: Sequence[int],
    seconds: Sequence[float],
    *,
    phases: tuple[str, ...] = PHASES,
    ordered: bool = True,
) -> Rival:
    return Rival(name, tuple(sizes), tuple(seconds), phases, ordered)
