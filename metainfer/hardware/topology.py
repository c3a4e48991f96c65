"""Topology: the way between two GPUs, links that several of them share, islands, a fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields

from metainfer.hardware.facts import Unknown, plain
from metainfer.hardware.machine import Gpu, Machine
from metainfer.hardware.pcie import Bridge, PcieLink, Peer


@dataclass(frozen=True, slots=True)
class Way:
    """From one GPU up to where both meet, and down to the other.

    Attributes:
        meets: name of the bridge below which both hang; "" where they meet at the processor.
        crosses_sockets: they hang at different NUMA nodes; Unknown where a node is.
        links: names of what owns each link on the way: GPUs by place ("gpu 0"), bridges by name.
    """

    meets: str
    crosses_sockets: bool | Unknown
    links: tuple[str, ...]

    @property
    def kind(self) -> str:
        """As nvidia-smi topo names it: PIX and PXB (below switches), PHB (one root), NODE, SYS."""
        if self.crosses_sockets is True:
            return "SYS"
        if not self.meets:
            return "NODE"
        return "PIX" if len(self.links) == 2 else "PXB"


def way(machine: Machine, source: int, target: int) -> Way | Unknown:
    """The way between two places in `Machine.gpus`; Unknown where the tree is."""
    if isinstance(machine.gpus, Unknown):
        return machine.gpus
    one, other = machine.gpus[source], machine.gpus[target]
    up, down = above(machine, one), above(machine, other)
    for chain in (up, down):
        if isinstance(chain, Unknown):
            return chain
    assert not isinstance(up, Unknown) and not isinstance(down, Unknown)
    shared = {bridge.name for bridge in up} & {bridge.name for bridge in down}
    meets = next((bridge.name for bridge in up if bridge.name in shared), "")
    links = [f"gpu {source}"]
    links += [bridge.name for bridge in up if bridge.name not in shared]
    links += [bridge.name for bridge in reversed(down) if bridge.name not in shared]
    links.append(f"gpu {target}")
    return Way(meets, _crosses(one, other), tuple(links))


def above(machine: Machine, gpu: Gpu) -> tuple[Bridge, ...] | Unknown:
    """The bridges from a GPU up to its root, the nearest first."""
    if isinstance(gpu.parent, Unknown):
        return gpu.parent
    if isinstance(machine.bridges, Unknown):
        return machine.bridges
    by_name = {bridge.name: bridge for bridge in machine.bridges}
    found: list[Bridge] = []
    name = gpu.parent
    while name is not None:
        if name not in by_name or len(found) > len(by_name):
            return Unknown(f"the tree has no way up from {name}")
        found.append(by_name[name])
        name = by_name[name].parent
    return tuple(found)


def _crosses(one: Gpu, other: Gpu) -> bool | Unknown:
    for node in (one.numa_node, other.numa_node):
        if isinstance(node, Unknown):
            return node
    return one.numa_node != other.numa_node


def shared_uplinks(machine: Machine) -> dict[str, tuple[int, ...]] | Unknown:
    """Bridges whose link up several GPUs share: name -> places of those GPUs."""
    if isinstance(machine.gpus, Unknown):
        return machine.gpus
    below: dict[str, list[int]] = {}
    for place, gpu in enumerate(machine.gpus):
        chain = above(machine, gpu)
        if isinstance(chain, Unknown):
            return chain
        for bridge in chain:
            if isinstance(bridge.link, PcieLink):
                below.setdefault(bridge.name, []).append(place)
    return {name: tuple(places) for name, places in below.items() if len(places) > 1}


def islands(machine: Machine) -> tuple[tuple[int, ...], ...] | Unknown:
    """GPUs by the NUMA node that they hang at, those of one node together."""
    if isinstance(machine.gpus, Unknown):
        return machine.gpus
    by_node: dict[int, list[int]] = {}
    for place, gpu in enumerate(machine.gpus):
        if isinstance(gpu.numa_node, Unknown):
            return gpu.numa_node
        by_node.setdefault(gpu.numa_node, []).append(place)
    return tuple(tuple(places) for _, places in sorted(by_node.items()))


def p2p_everywhere(machine: Machine) -> bool | Unknown:
    """Whether the driver lets every GPU reach every other one's memory."""
    if isinstance(machine.peers, Unknown):
        return machine.peers
    if any(peer.p2p is False for peer in machine.peers):
        return False
    unknown = [peer.p2p for peer in machine.peers if isinstance(peer.p2p, Unknown)]
    return unknown[0] if unknown else True


def fingerprint(machine: Machine) -> str:
    """Of all that decides how fast its GPUs compute and talk: two machines with the same one may
    share measurements. 16 hexadecimal digits."""
    gpus = machine.gpus
    facts = {
        "gpus": plain(gpus) if isinstance(gpus, Unknown) else [_lasting(gpu) for gpu in gpus],
        "bridges": plain(machine.bridges) if isinstance(machine.bridges, Unknown) else
        [_lasting(bridge) for bridge in machine.bridges],
        "peers": plain(machine.peers) if isinstance(machine.peers, Unknown) else
        [_lasting(peer) for peer in machine.peers],
        "host": plain(machine.host),
        "driver": plain(machine.driver),
        "cpu": plain(machine.cpu.model),
    }  # fmt: skip
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_PASSING = frozenset(
    {"free_bytes", "clocks", "throttle", "utilisation", "processes", "power", "uuid"}
)
"""Fields of a GPU that change by themselves, and the one that says which of its kind it is."""


def _lasting(record: Gpu | Bridge | Peer) -> dict[str, object]:
    """The fields that stay while nobody changes the machine; of links what they could do and how
    wide they are, for idle ones slow down."""
    found: dict[str, object] = {}
    for one in fields(record):
        value = getattr(record, one.name)
        if one.name in _PASSING:
            continue
        if isinstance(value, PcieLink):
            value = (value.width, value.most_generation, value.most_width)
        found[one.name] = (
            [plain(item) for item in value] if isinstance(value, tuple) else plain(value)
        )
    return found
