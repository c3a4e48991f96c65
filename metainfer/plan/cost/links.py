"""Links: what the PCIe tree gives to groups of GPUs that all exchange at once.

Groups are of GPUs that lie next to each other in the tree. A ring crosses each link between two of
its neighbours once a way; where all of a group send to all others, a link carries every pair that
it separates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import permutations

from metainfer.hardware.cards import card_of_gpu
from metainfer.hardware.curves import COPY, FROM_HOST, STORE, TO_HOST, trusted
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Gpu, Machine, gpus_of
from metainfer.hardware.pcie import Bridge, PcieLink
from metainfer.hardware.topology import above
from metainfer.plan.cost.constants import INFERRED, Constants
from metainfer.plan.cost.curves_of import largest_rate

_SOCKETS = "between sockets"

Hop = tuple[str, bool]
"""A link by its owner, and whether it is taken upwards."""


class Links:
    """Of one machine."""

    def __init__(self, machine: Machine, constants: Constants) -> None:
        self._machine = machine
        self._constants = constants
        self._gpus = gpus_of(machine)
        self.nvlink = machine.nvlink is True
        self.origin = INFERRED
        self.problem = ""
        self._rates: dict[str, float] = {}
        self._chains: list[tuple[Bridge, ...]] = []
        self._learn()
        self.order = self._ordered()
        self._denied = {
            (peer.source, peer.target)
            for peer in (() if isinstance(machine.peers, Unknown) else machine.peers)
            if peer.p2p is False
        }
        if isinstance(machine.peers, Unknown) and not self.nvlink:
            self._denied |= self._denied_by_card()
        self.amd_host = machine.cpu.of_amd is True
        self._cache: dict[tuple[str, int, int], float] = {}

    def groups(self, ranks: int, groups: int) -> list[tuple[int, ...]]:
        """Places of the GPUs of the first groups."""
        return [tuple(self.order[n * ranks : (n + 1) * ranks]) for n in range(groups)]

    def p2p(self, group: Sequence[int]) -> bool:
        return not any(pair in self._denied for pair in permutations(group, 2))

    def p2p_all(self) -> bool:
        return not self._denied

    def denied(self) -> int:
        """Ordered pairs without peer access."""
        return len(self._denied)

    def switched(self, group: Sequence[int]) -> bool:
        """All pairs meet below a root: at a switch."""
        shared = [{bridge.name for bridge in self._chains[place]} for place in group]
        return bool(shared and set.intersection(*shared))

    def crosses_sockets(self, group: Sequence[int]) -> bool:
        nodes = {n for n in (self._node(place) for place in group) if n is not None}
        return len(nodes) > 1

    def ring(self, ranks: int, groups: int) -> float:
        """Bytes a second that the slowest of the rings passes on."""
        key = ("ring", ranks, groups)
        if key not in self._cache:
            flows = []
            for group in self.groups(ranks, groups):
                hops: Counter[Hop] = Counter()
                for place, target in zip(group, (*group[1:], group[0]), strict=True):
                    hops.update(self._hops(place, target))
                flows.append(hops)
            self._cache[key] = self._slowest(flows)
        return self._cache[key]

    def all_to_all(self, ranks: int, groups: int) -> float:
        """Bytes a second that each rank sends in all, where each sends to all of its group."""
        key = ("all", ranks, groups)
        if key not in self._cache:
            flows = []
            for group in self.groups(ranks, groups):
                hops: Counter[Hop] = Counter()
                for place, target in permutations(group, 2):
                    hops.update(self._hops(place, target))
                flows.append(hops)
            self._cache[key] = self._slowest(flows) * max(1, ranks - 1)
        return self._cache[key]

    @cached_property
    def from_host(self) -> float:
        """Bytes a second that each GPU reads of host memory, all at once, while none writes."""
        return self._host(FROM_HOST) or self._host(TO_HOST) or self._tree_to_host()

    @cached_property
    def staged(self) -> float:
        """Bytes a second of each way between host memory and each GPU, all at once and both ways
        at once, as exchanges through it go; the slower way is what they wait for."""
        ways = [rate for rate in map(self._host, (TO_HOST, FROM_HOST)) if rate]
        slower = min(ways) if ways else self._tree_to_host()
        return slower * self._constants.transfer("staged")

    def _host(self, means: str) -> float:
        """As recorded of this way alone, where several GPUs are of all at once; 0 where it was
        not. Of one GPU `at_once` is both ways, which is what `staged` counts with itself."""
        recorded = [
            curve.bytes[-1] / curve.seconds[-1]
            for curve in trusted(self._machine.curves)
            if curve.means == means
            and curve.at_once == (len(self._gpus) > 1)
            and len(curve.gpus) == len(self._gpus)
        ]
        return min(recorded, default=0.0)

    def _tree_to_host(self) -> float:
        """By links of the tree, which are as wide down as up."""
        hops: Counter[Hop] = Counter()
        for place in range(len(self._gpus)):
            hops[f"gpu {place}", True] += 1
            hops.update((bridge.name, True) for bridge in self._chains[place] if bridge.parent)
        return self._slowest([hops])

    def dram(self) -> float:
        known = self._machine.host.memory_bytes_per_s
        usable = self._constants.transfer("dram_share")
        if isinstance(known, Unknown):
            return self._constants.transfer("dram_bytes_per_s")
        return known * usable

    def _slowest(self, flows: Sequence[Counter[Hop]]) -> float:
        """Of the slowest of the groups whose flows these are, all at once."""
        used: Counter[Hop] = Counter()
        for hops in flows:
            used.update(hops)
        rates = [
            self._rate(owner) / used[owner, up] for hops in flows for owner, up in hops
        ]  # fmt: skip
        return min(rates, default=math.inf)  # a group of one sends nothing over any link

    def _rate(self, owner: str) -> float:
        if owner.startswith(_SOCKETS):
            return self._sockets()
        return self._rates[owner]

    def _hops(self, source: int, target: int) -> list[Hop]:
        """Links from one GPU to another."""
        up, down = self._chains[source], self._chains[target]
        shared = {bridge.name for bridge in up} & {bridge.name for bridge in down}
        found: list[Hop] = [(f"gpu {source}", True)]
        found += [(b.name, True) for b in up if b.name not in shared and b.name in self._rates]
        nodes = self._node(source), self._node(target)
        if None not in nodes and nodes[0] != nodes[1]:
            # A way for each pair of sockets and direction.
            found.append((f"{_SOCKETS} {nodes[0]} {nodes[1]}", True))
        found += [(b.name, False) for b in down if b.name not in shared and b.name in self._rates]
        return [*found, (f"gpu {target}", False)]

    def _node(self, place: int) -> int | None:
        node = self._gpus[place].numa_node
        if isinstance(node, Unknown) or self._machine.host.sockets == 1:
            return None
        return node

    def _sockets(self) -> float:
        known = self._constants.transfers["socket_bytes_per_s"]
        return float(known[str(max(4, min(5, self._generation)))])

    def _learn(self) -> None:
        """Rates of all links, or what is not known of them."""
        share = self._constants.transfer("link")
        copied = largest_rate(trusted(self._machine.curves), (COPY, STORE))
        generations = [4]
        for place, gpu in enumerate(self._gpus):
            rate, generation = _link_of(gpu)
            if isinstance(rate, Unknown):
                self.problem = f"the link of GPU {place} ({gpu.name}) is unknown: {rate.why}"
                rate = 1.0
            generations.append(generation)
            self._rates[f"gpu {place}"] = rate * share
            chain = above(self._machine, gpu)
            self._chains.append(() if isinstance(chain, Unknown) else chain)
        for bridge in () if isinstance(self._machine.bridges, Unknown) else self._machine.bridges:
            if bridge.parent is None or isinstance(bridge.link, Unknown):
                continue
            rate = bridge.link.bytes_per_s()
            if not isinstance(rate, Unknown):
                self._rates[bridge.name] = rate * share
        self._generation = max(generations)
        if copied is not None:
            # One copy of one pair tells what the links of GPUs make; wider uplinks stay as wired.
            per_s, self.origin = copied
            for place in range(len(self._gpus)):
                self._rates[f"gpu {place}"] = min(per_s, self._rates[f"gpu {place}"] / share)

    def _ordered(self) -> tuple[int, ...]:
        """GPUs that hang together next to each other."""

        def path(place: int) -> tuple[object, ...]:
            node = self._node(place)
            names = tuple(bridge.name for bridge in reversed(self._chains[place]))
            return (-1 if node is None else node, names, place)

        return tuple(sorted(range(len(self._gpus)), key=path))

    def _denied_by_card(self) -> set[tuple[int, int]]:
        """What drivers as shipped deny, where nobody asked."""
        cards = [card_of_gpu(gpu) for gpu in self._gpus]
        return {
            (source, target)
            for source, target in permutations(range(len(cards)), 2)
            if any(c is not None and not c.p2p for c in (cards[source], cards[target]))
        }


def _link_of(gpu: Gpu) -> tuple[float | Unknown, int]:
    """Bytes a second as coded and generation; the card's most over 16 lanes where nobody looked."""
    if isinstance(gpu.link, PcieLink):
        generation = gpu.link.most_generation
        if isinstance(generation, Unknown):
            generation = gpu.link.generation
        return gpu.link.bytes_per_s(), 4 if isinstance(generation, Unknown) else generation
    card = card_of_gpu(gpu)
    if card is None:
        return gpu.link, 4
    link = PcieLink(card.pcie_generation, 16)
    return link.bytes_per_s(), card.pcie_generation
