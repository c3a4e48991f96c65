"""Curves and rates: what was measured on a machine, or published of one like it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

STORE, LOAD, COPY = "peer store", "peer load", "copy engine"
TO_HOST, FROM_HOST, STAGED = "to host", "from host", "host staged"
NCCL = "NCCL"
MEANS = (STORE, LOAD, COPY, TO_HOST, FROM_HOST, STAGED, NCCL)
"""How bytes move."""

RING, ALL_TO_ALL, SEVERAL_ROOTS, PULL = "ring", "all_to_all", "several_roots", "pull"
"""Operations besides "copy" and collectives: each rank to the next; each to all others; those of
one half of the roots to some of the other half, two each; a copy that the target starts."""

MEASURED_HERE = "measured here"
"""How the source of what was measured on the machine itself begins."""
OF_ANOTHER = "inferred of another machine"
"""In the source of what was published of a machine with other cards or another board."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Time against bytes.

    Attributes:
        means: one of `MEANS`.
        operation: "copy" of one rank to another, or a collective such as "all_reduce".
        gpus: places in `Machine.gpus` that took part; for a copy, (source, target).
        at_once: all pairs or ranks ran at the same time; the slowest counts.
        bytes, seconds: as many of each, bytes ascending; of a collective, each rank's payload.
        verified: what arrived was compared with what was sent. Where it was measured here and is
            False, other data arrived, and `bytes` ends before the first size at which it did.
        source: "measured here", or where it was published; what had to be inferred is said.
    """

    means: str
    operation: str
    gpus: tuple[int, ...]
    at_once: bool
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    verified: bool
    source: str

    @property
    def trusted(self) -> bool:
        """Not where it was seen here that wrong data arrives."""
        return self.verified or not self.source.startswith(MEASURED_HERE)

    def seconds_of(self, size: float) -> float:
        """Between points by straight lines, as a start and a rate give them, for points may lie far
        apart; before the first its time, behind the last its rate."""
        if size <= self.bytes[0]:
            return self.seconds[0]
        if size >= self.bytes[-1]:
            return self.seconds[-1] * size / self.bytes[-1]
        place = bisect_left(self.bytes, size)
        low, high = self.bytes[place - 1], self.bytes[place]
        before, after = self.seconds[place - 1], self.seconds[place]
        return before + (after - before) * (size - low) / (high - low)


def trusted(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    """Those that anything may be counted with."""
    return tuple(curve for curve in curves if curve.trusted and curve.bytes)


@dataclass(frozen=True, slots=True)
class Rate:
    """What a card reaches in one kind of work.

    Attributes:
        work: such as "product fp8", "experts fp4", "attention bf16", "copy".
        rows: of the operand that grows with tokens; 0 where it does not matter.
        per_s: operations, or bytes for "copy", a second.
        source: "measured here", or where it was published and what is inferred.
    """

    work: str
    rows: int
    per_s: float
    source: str
