"""Trials: what is measured of how GPUs talk, in the order of what matters most.

Where there are many pairs, all neighbours in a ring and one pair of each kind of way stand for the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from metainfer.hardware.curves import (
    ALL_TO_ALL,
    COPY,
    FROM_HOST,
    LOAD,
    NCCL,
    PULL,
    RING,
    SEVERAL_ROOTS,
    STAGED,
    STORE,
    TO_HOST,
)
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine
from metainfer.hardware.topology import above, way

HOST_LINKS, PAIRS, AT_ONCE = "host links", "pairs alone", "all at once"
COLLAPSE, THROUGH_HOST, COLLECTIVES = "several roots", "through the host", "collectives"
SHARES = {HOST_LINKS: 12, PAIRS: 30, AT_ONCE: 14, COLLAPSE: 6, COLLECTIVES: 18, THROUGH_HOST: 10}
"""Parts of the time, shared out beforehand; what one leaves goes to those behind it."""

SIZES = tuple(2**n for n in range(10, 29, 2))
"""1 KB to 256 MB."""

_LARGE = tuple(2**n for n in (20, 24, 26))
_ALL_PAIRS_UP_TO = 4
_TILE_BYTES = 64  # payloads are multiples of it, so that one kernel serves all
_SLOT_BYTES = 512  # slots begin at multiples of it
COLLECTIVE_NAMES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that go from one GPU to another, or between one and its host memory.

    Attributes:
        source, target: places in `Machine.gpus`; the same for a GPU and its host memory.
        means: of `hardware.curves.MEANS`.
        pulled: the target moves them where the means would let the source.
    """

    source: int
    target: int
    means: str
    pulled: bool = False

    @property
    def movers(self) -> tuple[int, ...]:
        """Who does something."""
        if self.means == STAGED:
            return (self.source, self.target)
        return (self.target if self.means == LOAD or self.pulled else self.source,)


@dataclass(frozen=True, slots=True)
class Trial:
    """One curve to be measured.

    Attributes:
        part: of `SHARES`.
        means, operation, gpus, at_once, bytes: as of `Curve`; of several flows of one source,
            bytes are those of all of them.
        flows: all of them run at the same time; () for a collective.
    """

    part: str
    means: str
    operation: str
    gpus: tuple[int, ...]
    at_once: bool
    flows: tuple[Flow, ...]
    bytes: tuple[int, ...] = SIZES

    def flow_bytes(self, size: int) -> int:
        """Of each flow, where each source sends `size`."""
        sources = [flow.source for flow in self.flows]
        each = max(sources.count(source) for source in set(sources))
        if self.means in (TO_HOST, FROM_HOST):
            each = 1
        return max(size // each // _TILE_BYTES, 1) * _TILE_BYTES

    def slot_bytes(self, size: int, guard_bytes: int) -> int:
        """What a flow has of an area, with its guard."""
        return -(-(self.flow_bytes(size) + guard_bytes) // _SLOT_BYTES) * _SLOT_BYTES

    def slot_in(self, flow: Flow) -> tuple[int, int]:
        """Numbers of its slots: among what its source sends, and among what its target gets."""
        place = self.flows.index(flow)
        before = self.flows[:place]
        return (
            sum(other.source == flow.source for other in before),
            sum(other.target == flow.target for other in before),
        )

    def slots(self) -> int:
        """The most that any GPU sends or gets."""
        ends = [[f.source for f in self.flows], [f.target for f in self.flows]]
        return max(side.count(place) for side in ends for place in set(side))


def area_bytes(trials: Sequence[Trial], guard_bytes: int) -> int:
    """What each GPU needs for what it sends, as much for what it gets, and of host memory."""
    return max(
        (t.slots() * t.slot_bytes(t.bytes[-1], guard_bytes) for t in trials if t.flows), default=0
    )


def trials_of(
    machine: Machine, gpus: Sequence[int], sizes: Sequence[int] = SIZES
) -> tuple[Trial, ...]:
    """All curves of `gpus`, places in the machine, that sizes are given for.

    Pairs that the driver denies are left out (`denied` lists them).
    """
    order = tuple(gpus)
    taken = tuple(sizes)
    found = list(_host(order, taken))
    if len(order) > 1:
        away = denied(machine)
        pairs = [pair for pair in _pairs(machine, order) if pair not in away]
        found += _alone(pairs, taken)
        found += _together(order, away, taken)
        found += _roots(machine, order, away, taken)
        found += _collectives(order, taken)
        found += _staged(_pairs(machine, order), order, taken)
    return tuple(found)


def denied(machine: Machine) -> frozenset[tuple[int, int]]:
    """Ordered pairs without access to each other's memory, as the driver says."""
    if isinstance(machine.peers, Unknown):
        return frozenset()
    return frozenset((p.source, p.target) for p in machine.peers if p.p2p is False)


def _host(gpus: Sequence[int], sizes: tuple[int, ...]) -> Iterator[Trial]:
    for gpu in gpus:
        for means in (TO_HOST, FROM_HOST):
            yield Trial(HOST_LINKS, means, "copy", (gpu,), False, (Flow(gpu, gpu, means),), sizes)
    for means in (TO_HOST, FROM_HOST):
        ways = (means,) if len(gpus) > 1 else (TO_HOST, FROM_HOST)
        flows = tuple(Flow(gpu, gpu, each) for gpu in gpus for each in ways)
        yield Trial(HOST_LINKS, means, "copy", tuple(gpus), True, flows, sizes)


def _pairs(machine: Machine, gpus: Sequence[int]) -> list[tuple[int, int]]:
    """All ordered pairs of few GPUs; of many, neighbours and the first two of each kind of way."""
    everyone = list(permutations(gpus, 2))
    if len(gpus) <= _ALL_PAIRS_UP_TO:
        return everyone
    chosen = list(zip(gpus, (*gpus[1:], gpus[0]), strict=True))
    kinds: dict[str, int] = {}
    for pair in everyone:
        between = way(machine, *pair)
        kind = "" if isinstance(between, Unknown) else between.kind
        if kinds.setdefault(kind, 0) < 2:
            kinds[kind] += 1
            chosen.append(pair)
    return list(dict.fromkeys(chosen))


def _alone(pairs: Sequence[tuple[int, int]], sizes: tuple[int, ...]) -> Iterator[Trial]:
    for pair in pairs:
        for means in (STORE, LOAD, COPY):
            yield Trial(PAIRS, means, "copy", pair, False, (Flow(*pair, means),), sizes)
        yield Trial(PAIRS, COPY, PULL, pair, False, (Flow(*pair, COPY, True),), sizes)


def _together(
    gpus: Sequence[int], away: frozenset[tuple[int, int]], sizes: tuple[int, ...]
) -> Iterator[Trial]:
    """To the next, and to all others: nearest first, so that nobody gets all at one time."""
    count = len(gpus)
    every = [(gpus[n], gpus[(n + step) % count]) for step in range(1, count) for n in range(count)]
    for operation, pairs in ((RING, every[:count]), (ALL_TO_ALL, every)):
        if away & set(pairs) or (operation == ALL_TO_ALL and count == 2):
            continue  # what two send to the next they send to all others
        for means in (STORE, LOAD, COPY):
            flows = tuple(Flow(*pair, means) for pair in pairs)
            yield Trial(AT_ONCE, means, operation, tuple(gpus), True, flows, sizes)


def _roots(
    machine: Machine, gpus: Sequence[int], away: frozenset[tuple[int, int]], sizes: tuple[int, ...]
) -> Iterator[Trial]:
    """From half of the roots to two cards each of the other half, below different roots where there
    are any: what makes some processors' writes collapse."""
    pairs = [pair for pair in crossing(machine, gpus) if pair not in away]
    taken = tuple(size for size in sizes if size in _LARGE) or sizes[-1:]
    for means in (STORE, LOAD, COPY) if pairs else ():
        flows = tuple(Flow(*pair, means) for pair in pairs)
        yield Trial(COLLAPSE, means, SEVERAL_ROOTS, tuple(gpus), True, flows, taken)


def crossing(machine: Machine, gpus: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of the test of several roots; none of fewer than four GPUs."""
    if len(gpus) < 4 or isinstance(machine.gpus, Unknown):
        return []
    by_root: dict[str, list[int]] = {}
    for place in gpus:
        chain = above(machine, machine.gpus[place])
        root = f"gpu {place}" if isinstance(chain, Unknown) or not chain else chain[-1].name
        by_root.setdefault(root, []).append(place)
    roots = list(by_root.values())
    if len(roots) < 2:
        return []
    sources = [place for root in roots[: len(roots) // 2] for place in root]
    others = roots[len(roots) // 2 :]
    depth = max(map(len, others))
    dealt = [root[n] for n in range(depth) for root in others if n < len(root)]
    return [
        (source, dealt[(number + step) % len(dealt)])
        for number, source in enumerate(sources)
        for step in range(min(2, len(dealt)))
    ]


def _collectives(gpus: Sequence[int], sizes: tuple[int, ...]) -> Iterator[Trial]:
    """Of all, and of the first two, four and so on."""
    counts = sorted({n for n in (2, 4, 8) if n < len(gpus)} | {len(gpus)}, reverse=True)
    for count in counts:
        for operation in COLLECTIVE_NAMES:
            most = sizes[-1] // count if operation == "all_gather" else sizes[-1]
            taken = tuple(size for size in sizes if size <= most) or sizes[:1]
            yield Trial(COLLECTIVES, NCCL, operation, tuple(gpus[:count]), True, (), taken)


def _staged(
    pairs: Sequence[tuple[int, int]], gpus: Sequence[int], sizes: tuple[int, ...]
) -> Iterator[Trial]:
    around = tuple(zip(gpus, (*gpus[1:], gpus[0]), strict=True))
    yield Trial(
        THROUGH_HOST,
        STAGED,
        RING,
        tuple(gpus),
        True,
        tuple(Flow(*p, STAGED) for p in around),
        sizes,
    )
    for pair in pairs:
        yield Trial(THROUGH_HOST, STAGED, "copy", pair, False, (Flow(*pair, STAGED),), sizes)
