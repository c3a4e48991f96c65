"""Host: memory and cores that cards lean on."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import gpus_of
from metainfer.hardware.topology import p2p_everywhere
from metainfer.plan.cost.constants import read_constants
from metainfer.plan.cost.links import Links

_BANDWIDTH = "bandwidth of host memory"
_CORES = "cores for cards"
_NODES = "memory of NUMA nodes"

_DESKTOP = 120e9
_WORKSTATION = 300e9
"""Two channels of DDR5 make 90 GB/s, eight 300 to 410, twelve 460 and more (channels times MT/s
times 8 bytes); between these."""
_STAGED_BYTES = 3
"""Of host memory traffic for each byte that a card tells the others by way of the host, counted:
of n cards each writes what it has once and reads 2 (n - 1) / n as much."""
_CORES_A_CARD = 2
"""A judgement, no measurement: one for the worker, which spins, and one for what serves it (its
share of scheduler, tokenizer, NCCL's proxy). It decides between a warning and none."""


def bandwidth(patient: Patient) -> Iterator[Finding]:
    """By class. Without peer access all exchanges go through it."""
    machine = patient.machine
    gpus = gpus_of(machine)
    if len(gpus) < 2:
        return
    staged = p2p_everywhere(machine) is False
    known = machine.host.memory_bytes_per_s
    if isinstance(known, Unknown):
        yield Finding(
            _BANDWIDTH,
            Level.UNKNOWN,
            "how fast host memory is, is not known",
            known.why,
            "without peer access all that cards tell each other goes through it" if staged else "",
            "sudo dmidecode -t memory: filled channels times MT/s times 8 bytes",
        )
        return
    kind = "a desktop" if known < _DESKTOP else "a workstation"
    kind = kind if known < _WORKSTATION else "a server"
    evidence = f"{known / 1e9:.0f} GB/s nominal, {len(gpus)} cards"
    if not staged or known >= _WORKSTATION:
        yield Finding(_BANDWIDTH, Level.OK, f"host memory is that of {kind}", evidence)
        return
    each = Links(machine, read_constants()).dram() / (_STAGED_BYTES * len(gpus))
    yield Finding(
        _BANDWIDTH,
        Level.WARN,
        f"cards have no peer access, and host memory is that of {kind}",
        evidence,
        f"exchanges through the host leave each card about {each / 1e9:.0f} GB/s when all send at"
        " once",
        "fill all memory channels; prefer pipeline stages to tensor parallelism (thirty times"
        " fewer bytes), or fewer cards a group",
        "github.com/sgl-project/sglang/pull/39605",
    )


def cores(patient: Patient) -> Iterator[Finding]:
    """Each card's worker keeps a core busy, and the scheduler and the server want some."""
    machine = patient.machine
    count = len(gpus_of(machine))
    if count == 0:
        return
    known = machine.cpu.physical_cores
    quota = machine.cpu.quota_cores
    granted = known if quota is None else min(known, quota)
    evidence = f"{granted:g} cores for this process, {count} cards"
    if granted >= _CORES_A_CARD * count:
        yield Finding(_CORES, Level.OK, "there are cores enough for all cards", evidence)
        return
    yield Finding(
        _CORES,
        Level.WARN,
        f"{granted:g} cores are few for {count} cards",
        evidence,
        "workers spin while they wait: with less than a core each, launches of one hold up the"
        " next, and every decode step of all cards waits",
        "give the container more cores (docker --cpus), or use fewer cards a server",
    )


def nodes(patient: Patient) -> Iterator[Finding]:
    """A node without memory of its own: whatever its cards stage goes to the other socket."""
    known = patient.machine.host.numa_nodes
    if isinstance(known, Unknown) or len(gpus_of(patient.machine)) < 2:
        return
    places = {gpu.numa_node for gpu in gpus_of(patient.machine)}
    empty = [
        node.number
        for node in known
        if not isinstance(node.memory_bytes, Unknown)
        and node.memory_bytes < 2**30
        and node.number in places
    ]
    if empty:
        listed = ", ".join(map(str, empty))
        yield Finding(
            _NODES,
            Level.WARN,
            f"NUMA nodes with cards have no memory: {listed}",
            f"nodes {listed} of {len(known)}",
            "pinned buffers of their cards lie at the other processor, and half of its memory"
            " channels carry nothing",
            "fill the slots of every processor alike",
        )


CHECKS = (
    Check(_BANDWIDTH, "Is host memory fast enough for what goes through it?", bandwidth),
    Check(_CORES, "Are there cores enough for the workers of all cards?", cores),
    Check(_NODES, "Has every NUMA node with cards memory of its own?", nodes),
)
