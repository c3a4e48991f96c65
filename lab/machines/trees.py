"""A recorded machine before its curves: roots, what hangs at them, and where cards are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.machines.figures import (
    NOT_SAID,
    STAND_IN,
)
from metainfer.hardware.cards import Card
from metainfer.hardware.curves import Curve
from metainfer.hardware.machine import (
    Bridge,
    Cpu,
    Gpu,
    Host,
    Machine,
    Memory,
    NumaNode,
    PcieLink,
    Peer,
    Power,
    Source,
    Unknown,
)


@dataclass
class Build:
    """A machine before its curves: roots, what hangs at them, and where cards are."""

    card: Card
    driver_name: str
    link: PcieLink
    bridges: list[Bridge] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)  # (parent, NUMA node) of each GPU

    def direct(self, count: int, node: int = 0) -> Build:
        """Cards at root ports of their own."""
        for _ in range(count):
            name = f"root {len([b for b in self.bridges if b.kind == 'root'])}"
            self.bridges.append(Bridge(name, "root", None, node))
            self.places.append((name, node))
        return self

    def switched(self, count: int, each: int, node: int = 0) -> Build:
        """`count` switches at roots of their own, `each` cards below."""
        for _ in range(count):
            number = len([b for b in self.bridges if b.kind == "root"])
            self.bridges.append(Bridge(f"root {number}", "root", None, node))
            self.bridges.append(Bridge(f"switch {number}", "switch", f"root {number}", node, self.link, False))
            self.places += [(f"switch {number}", node)] * each
        return self

    def gpus(self) -> tuple[Gpu, ...]:
        card = self.card
        return tuple(
            Gpu(
                self.driver_name, card.capability, card.memory_bytes, card.memory_bytes,
                multiprocessors=card.multiprocessors, shared_block_bytes=card.shared_block_bytes,
                memory_bytes_per_s=card.memory_bytes_per_s, parent=parent, numa_node=node, link=self.link,
                power=Power(card.power_w, card.power_w), mig=False, throttle=(), processes=(),
            )
            for parent, node in self.places
        )  # fmt: skip

    def peers(self) -> tuple[Peer, ...]:
        count = range(len(self.places))
        why = "" if self.card.p2p else self.card.p2p_why
        return tuple(Peer(a, b, self.card.p2p, why) for a in count for b in count if a != b)


def machine(
    build: Build,
    curves: Sequence[Curve],
    sources: Sequence[Source],
    *,
    cpu: str | Unknown = NOT_SAID,
    cores: int | None = None,
    memory: int | Unknown = NOT_SAID,
    memory_rate: float | Unknown = NOT_SAID,
    board: str | Unknown = NOT_SAID,
    iommu: str | Unknown = NOT_SAID,
    hmm: bool | Unknown = NOT_SAID,
    driver: str | Unknown = NOT_SAID,
    versions: dict[str, str] | None = None,
) -> Machine:
    """Card and cores add their sources to those given."""
    nodes = sorted({node for _, node in build.places})
    named = {source.fields for source in sources}
    more = [
        Source(
            "gpus.memory_bytes, gpus.multiprocessors, gpus.shared_block_bytes, gpus.memory_bytes_per_s, gpus.power",
            f"cards.json: {build.card.name}",
            "free_bytes, throttle, processes: of a card that is idle",
        ),
        Source("rates", f"cards.json: {build.card.name}", "" if build.card.rates else "none is published"),
        Source("peers", f"cards.json: {build.card.name}", "the same for all pairs"),
    ]
    if cores is None:
        more.append(Source("cpu.physical_cores, cpu.logical_cores", "none", STAND_IN))
    count = cores or 2 * len(build.places)
    return Machine(
        system="Linux x86_64",
        cpu=Cpu(cpu, count, 2 * count if cores else count, None, NOT_SAID),
        memory=Memory(memory, memory, None),
        gpus=build.gpus(),
        driver=driver,
        versions=versions or {},
        host=Host(
            board=board,
            sockets=len(nodes),
            numa_nodes=tuple(NumaNode(node, (), NOT_SAID) for node in nodes),
            memory_bytes_per_s=memory_rate,
            iommu=iommu,
            hmm=hmm,
            kernel_parameters=NOT_SAID,
            relaxed_p2p=NOT_SAID,
        ),
        bridges=tuple(build.bridges),
        peers=build.peers(),
        nvlink=build.card.nvlink_bytes_per_s > 0 and len(build.places) > 1,
        curves=tuple(curves),
        rates=build.card.rates,
        sources=(*sources, *(one for one in more if one.fields not in named)),
    )
