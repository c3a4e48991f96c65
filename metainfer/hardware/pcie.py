"""PCIe: links, the tree that they form, and what pairs of GPUs may do over it."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.hardware.facts import NOT_ASKED, Unknown

# Bytes per second of one lane and direction, after line coding (PCI-SIG: 128b/130b from generation
# 3 on, 8b/10b before; generation 6 in flits of 236/256).
_LANE_BYTES_PER_S = {
    1: 0.25e9,
    2: 0.5e9,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 236 / 256,
}


@dataclass(frozen=True, slots=True)
class PcieLink:
    """The way from a device or switch up to what it hangs at.

    Attributes:
        generation, width: as it runs now; many cards lower the generation while they idle.
        most_generation, most_width: what both of its ends could do.
    """

    generation: int | Unknown
    width: int | Unknown
    most_generation: int | Unknown = NOT_ASKED
    most_width: int | Unknown = NOT_ASKED

    def bytes_per_s(self) -> float | Unknown:
        """One direction, as wired: of the most that it can do where that is known, for idle links
        wake up."""
        generation = self.generation
        if not isinstance(self.most_generation, Unknown):
            generation = self.most_generation
        if isinstance(generation, Unknown):
            return generation
        if isinstance(self.width, Unknown):
            return self.width
        lane = _LANE_BYTES_PER_S.get(generation)
        if lane is None:
            return Unknown(f"the rate of PCIe generation {generation} is not listed")
        return lane * self.width


@dataclass(frozen=True, slots=True)
class Bridge:
    """A root port or the way into a switch; all below it share its link.

    Attributes:
        name: of its place on the bus, such as "0000:40:01.1", or any that is its own in a record.
        kind: "root" or "switch".
        parent: name of the bridge above; None at a root.
        numa_node: of the root that it hangs at.
        link: up to the parent; Unknown at a root.
        acs_redirects: whether access control sends traffic between its children up to the root.
    """

    name: str
    kind: str
    parent: str | None
    numa_node: int | Unknown = NOT_ASKED
    link: PcieLink | Unknown = NOT_ASKED
    acs_redirects: bool | Unknown = NOT_ASKED


@dataclass(frozen=True, slots=True)
class Peer:
    """What the driver says of one GPU's access to another's memory.

    Attributes:
        source, target: places in `Machine.gpus`.
        p2p: whether the driver lets it read and write there.
        why: what the driver gives as the reason where it does not; "" else.
        atomics: whether atomics work there too.
    """

    source: int
    target: int
    p2p: bool | Unknown
    why: str = ""
    atomics: bool | Unknown = NOT_ASKED
