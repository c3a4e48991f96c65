"""Record: values that no such card or link can have, or that contradict each other.

Everything else here and in `metainfer plan` counts with the record: what is wrong in it is wrong in
all of them. What a record of any machine must keep to is refused when it is read
(`hardware.coherence`); here is what only physics and the card's data sheet rule out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from metainfer.core.units import format_bytes
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.cards import Card, all_cards, card_of_gpu
from metainfer.hardware.curves import FROM_HOST, LOAD, MEASURED_HERE, STORE, TO_HOST, Curve
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Clocks, Gpu, Machine, Power, gpus_of
from metainfer.hardware.pcie import PcieLink

_IMPOSSIBLE = "impossible values"
_CONTRADICTING = "contradicting values"

_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_SLOT = 16
_SLACK = 1.05
"""By which a figure may lie above what it cannot exceed: clocks and rounding."""
_FALLS = 0.75
"""More bytes in less time than this share is no noise."""
_OF_BYTES = 2**16
"""Smaller messages are bound by starts, whose times scatter."""
_TIMES_SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""How often each rank sends (n - 1) / n of its payload, at least."""
_SENDS_ONCE = ("copy", "ring", "pull")
_COPIES = "copy"
"""The kind of work of a rate that counts bytes."""
_AGAIN = (
    "probe the machine again (`metainfer probe --out machine.json`, curves with --measure --fresh);"
    " if the value stays, mend the record by hand or put"
    ' {"unknown": "why"} in its place, and report it'
)


def impossible(patient: Patient) -> Iterator[Finding]:
    """What no card, link or curve can be."""
    machine = patient.machine
    if not gpus_of(machine):
        return
    odd = [*_of_links(machine), *_of_cards(machine), *_of_curves(machine), *_of_rates(machine)]
    for what, evidence in odd:
        yield Finding(
            _IMPOSSIBLE,
            Level.FAIL,
            what,
            evidence,
            "whatever was counted with it, here and in `metainfer plan`, is as wrong as it is",
            _AGAIN,
        )
    if not odd:
        yield Finding(
            _IMPOSSIBLE,
            Level.OK,
            "no value of the record is beyond what such cards and links can be",
            f"{len(gpus_of(machine))} cards, {len(machine.curves)} curves,"
            f" {len(machine.rates)} rates",
        )


def contradicting(patient: Patient) -> Iterator[Finding]:
    """Values of which one at most is right."""
    machine = patient.machine
    if not gpus_of(machine):
        return
    odd = [*_places(machine), *_pairs(machine), *_host(machine), *_both_ways(machine)]
    for what, evidence in odd:
        yield Finding(
            _CONTRADICTING,
            Level.WARN,
            what,
            evidence,
            "one of them is wrong, and findings that rest on either may be",
            _AGAIN,
        )
    if not odd:
        yield Finding(_CONTRADICTING, Level.OK, "no values of the record contradict each other",
                      "tree, pairs, memory, curves alone and at once")  # fmt: skip


Odd = tuple[str, str]  # what is odd, and the evidence


def _of_links(machine: Machine) -> Iterator[Odd]:
    for place, gpu in enumerate(gpus_of(machine)):
        card = card_of_gpu(gpu)
        yield from _of_link(f"GPU {place} ({gpu.name})", gpu.link, card)
    if not isinstance(machine.bridges, Unknown):
        for bridge in machine.bridges:
            yield from _of_link(f"bridge {bridge.name}", bridge.link, None)


def _of_link(name: str, link: PcieLink | Unknown, card: Card | None) -> Iterator[Odd]:
    if isinstance(link, Unknown):
        return
    for word, now, most in (
        ("generation", link.generation, link.most_generation),
        ("width", link.width, link.most_width),
    ):
        if not isinstance(now, Unknown) and not isinstance(most, Unknown) and now > most:
            yield f"the link of {name} runs above what it can do", f"{word} {now}, possible {most}"
    widths = {w for w in (link.width, link.most_width) if not isinstance(w, Unknown)}
    for width in sorted(widths - set(_WIDTHS)):
        yield f"the link of {name} has a number of lanes that PCIe does not know", f"{width} lanes"
    for width in sorted(widths & set(_WIDTHS)):
        if card is not None and width > _SLOT:
            yield f"the link of {name} has more lanes than a card has", f"{width} of {_SLOT}"
    now = link.generation
    if card is not None and not isinstance(now, Unknown) and now > card.pcie_generation:
        yield (
            f"the link of {name} is faster than its card",
            f"generation {now}; {card.name}: {card.pcie_generation}",
        )


def _of_cards(machine: Machine) -> Iterator[Odd]:
    for place, gpu in enumerate(gpus_of(machine)):
        name = f"GPU {place} ({gpu.name})"
        yield from _of_card(name, gpu)
        yield from _of_state(name, gpu)


def _of_card(name: str, gpu: Gpu) -> Iterator[Odd]:
    """Against the data sheet of the card that is called so."""
    called = [card for card in all_cards() if re.search(card.pattern, gpu.name)]
    if not called:
        return
    card = called[0]
    if gpu.capability not in {one.capability for one in called}:
        yield (
            f"the capability of {name} is not that of its card",
            f"{_dotted(gpu.capability)}; {card.name}: {_dotted(card.capability)}",
        )
    units = gpu.multiprocessors
    if not isinstance(units, Unknown) and units > max(one.multiprocessors for one in called):
        yield f"{name} has more multiprocessors than its card", f"{units}; {card.multiprocessors}"
    shared = gpu.shared_block_bytes
    if not isinstance(shared, Unknown) and shared > card.shared_block_bytes:
        yield (
            f"a block on {name} has more shared memory than its card gives",
            f"{shared:,} bytes; {card.name}: {card.shared_block_bytes:,}",
        )
    rate = gpu.memory_bytes_per_s
    if not isinstance(rate, Unknown) and rate > _SLACK * card.memory_bytes_per_s:
        yield (
            f"the memory of {name} is faster than its data sheet",
            f"{rate / 1e9:,.0f} GB/s; {card.name}: {card.memory_bytes_per_s / 1e9:,.0f}",
        )


def _of_state(name: str, gpu: Gpu) -> Iterator[Odd]:
    """Clocks and power against their own limits."""
    if isinstance(gpu.clocks, Clocks):
        clocks = gpu.clocks
        for word, now, most in (
            ("SM", clocks.sm_mhz, clocks.most_sm_mhz),
            ("memory", clocks.memory_mhz, clocks.most_memory_mhz),
        ):
            if isinstance(now, int) and isinstance(most, int) and now > _SLACK * most:
                yield f"the {word} clock of {name} is above its highest", f"{now} of {most} MHz"
    if isinstance(gpu.power, Power):
        draw, limit = gpu.power.draw_w, gpu.power.limit_w
        if isinstance(draw, float) and isinstance(limit, float) and draw > 1.5 * limit:
            yield f"{name} draws far more than its limit", f"{draw:.0f} of {limit:.0f} W"


def _of_curves(machine: Machine) -> Iterator[Odd]:
    for curve in machine.curves:
        if not curve.bytes:
            continue
        named = _named(curve)
        for (size, before), (larger, after) in pairwise(
            zip(curve.bytes, curve.seconds, strict=True)
        ):
            if size >= _OF_BYTES and after < _FALLS * before:
                yield (
                    f"more bytes take less time in the curve of {named}",
                    f"{format_bytes(size)} {before * 1e6:,.0f} us, {format_bytes(larger)}"
                    f" {after * 1e6:,.0f} us",
                )
                break
        if curve.source.startswith(MEASURED_HERE):
            yield from _over_the_wire(machine, curve)


def _over_the_wire(machine: Machine, curve: Curve) -> Iterator[Odd]:
    wire, whose = _wire(machine, curve)
    rate, size = max(
        (_sent(curve, size) / seconds, size)
        for size, seconds in zip(curve.bytes, curve.seconds, strict=True)
    )
    if wire and rate > _SLACK * wire:
        yield (
            f"the curve of {_named(curve)} is faster than the wire",
            f"{rate / 1e9:,.1f} GB/s at {format_bytes(size)}; {whose} carries {wire / 1e9:,.1f}",
        )


def _of_rates(machine: Machine) -> Iterator[Odd]:
    """Against the fastest card of the machine."""
    cards = [card for gpu in gpus_of(machine) if (card := card_of_gpu(gpu)) is not None]
    if len(cards) < len(gpus_of(machine)):
        return  # of a card that is not listed nothing is too fast
    for rate in machine.rates:
        kind, _, form = rate.work.removeprefix("plain ").partition(" ")
        form = form.partition(" in ")[2] or form
        if kind == _COPIES:
            most, unit = max(card.memory_bytes_per_s for card in cards), "TB/s"
        else:
            # Numbers of four bits may multiply rows of any format that the card has.
            forms = (form,) if form in ("bf16", "fp8") else tuple(cards[0].operations_per_s)
            most = max(
                (card.operations_per_s.get(one, 0.0) for card in cards for one in forms),
                default=0.0,
            )
            unit = "TFLOP/s"
        if most and rate.per_s > _SLACK * most:
            yield (
                f"the rate of '{rate.work}' is above what the card can do at all",
                f"{rate.per_s / 1e12:,.1f} {unit}; nominal {most / 1e12:,.1f}",
            )


def _places(machine: Machine) -> Iterator[Odd]:
    """Where cards hang: their own word against the tree's and the host's."""
    bridges = {} if isinstance(machine.bridges, Unknown) else {b.name: b for b in machine.bridges}
    nodes = machine.host.numa_nodes
    numbers = None if isinstance(nodes, Unknown) else {node.number for node in nodes}
    for place, gpu in enumerate(gpus_of(machine)):
        node = gpu.numa_node
        if numbers and not isinstance(node, Unknown) and node not in numbers:
            yield f"GPU {place} hangs at a NUMA node that the host does not have", f"node {node}"
        if not isinstance(gpu.parent, str) or isinstance(machine.bridges, Unknown):
            continue
        above = bridges.get(gpu.parent)
        if above is None:
            yield f"GPU {place} hangs at a bridge that the record does not list", f"{gpu.parent!r}"
        elif _differ(node, above.numa_node):
            yield (
                f"GPU {place} and the bridge above it are at different NUMA nodes",
                f"node {node}; {above.name}: node {above.numa_node}",
            )
    sockets = machine.host.sockets
    if not isinstance(sockets, Unknown) and numbers and sockets > len(numbers) > 1:
        yield "there are more processors than NUMA nodes", f"{sockets} and {len(numbers)}"


def _pairs(machine: Machine) -> Iterator[Odd]:
    """What the driver says of pairs, and what was measured between them."""
    cards = [card_of_gpu(gpu) for gpu in gpus_of(machine)]
    if machine.nvlink is True and cards and all(c and not c.nvlink_bytes_per_s for c in cards):
        yield "cards that have no NVLink are recorded as linked by it", f"{len(cards)} cards"
    if isinstance(machine.peers, Unknown):
        return
    said: dict[tuple[int, int], set[bool]] = {}
    for peer in machine.peers:
        if isinstance(peer.p2p, bool):
            said.setdefault((peer.source, peer.target), set()).add(peer.p2p)
        if peer.source == peer.target:
            yield f"GPU {peer.source} is listed as its own peer", "peers"
    for (source, target), answers in said.items():
        if len(answers) > 1:
            yield f"peer access of GPU {source} to {target} is both there and refused", "peers"
    refused = {pair for pair, answers in said.items() if answers == {False}}
    for curve in machine.curves:
        pair = tuple(curve.gpus)
        if curve.means in (STORE, LOAD) and curve.verified and pair in refused:
            yield (
                f"peer access of GPU {pair[0]} to {pair[1]} is refused, and a curve went over it",
                _named(curve),
            )


def _host(machine: Machine) -> Iterator[Odd]:
    memory = machine.memory
    total, available = memory.total_bytes, memory.available_bytes
    if not isinstance(total, Unknown) and not isinstance(available, Unknown) and available > total:
        yield (
            "more host memory is available than there is",
            f"{format_bytes(available)} of {format_bytes(total)}",
        )
    cpu = machine.cpu
    if cpu.logical_cores < cpu.physical_cores:
        yield (
            "there are fewer threads than cores",
            f"{cpu.logical_cores} and {cpu.physical_cores}",
        )
    for place, gpu in enumerate(gpus_of(machine)):
        if isinstance(gpu.processes, Unknown):
            continue
        sizes = [p.memory_bytes for p in gpu.processes if not isinstance(p.memory_bytes, Unknown)]
        if sum(sizes) > _SLACK * gpu.memory_bytes:
            yield (
                f"processes hold more of GPU {place} than it has",
                f"{format_bytes(sum(sizes))} of {format_bytes(gpu.memory_bytes)}",
            )


def _both_ways(machine: Machine) -> Iterator[Odd]:
    """With all at once nothing is faster than alone; what was published of sound links does not
    hold over lesser ones."""
    for curve in machine.curves:
        if curve.bytes and not curve.source.startswith(MEASURED_HERE):
            yield from _over_the_wire(machine, curve)
    alone: dict[tuple[str, str, tuple[int, ...]], Curve] = {}
    for curve in machine.curves:
        if not curve.at_once and curve.bytes:
            alone[curve.means, curve.operation, curve.gpus] = curve
    for curve in machine.curves:
        known = alone.get((curve.means, curve.operation, curve.gpus))
        if not curve.at_once or known is None or not curve.bytes:
            continue
        size = min(curve.bytes[-1], known.bytes[-1])
        slow, fast = known.seconds_of(size), curve.seconds_of(size)
        if size >= _OF_BYTES and fast < _FALLS * slow:
            yield (
                f"{_named(curve)} is faster with all at once than alone",
                f"{format_bytes(size)}: {fast * 1e6:,.0f} us at once, {slow * 1e6:,.0f} alone",
            )


def _wire(machine: Machine, curve: Curve) -> tuple[float, str]:
    """Bytes a second that the narrowest link of those who take part carries one way, and whose;
    0 where that is not known."""
    gpus = gpus_of(machine)
    ends = [(place, gpus[place]) for place in curve.gpus]
    fast = [0.0 if (card := card_of_gpu(gpu)) is None else card.nvlink_bytes_per_s
            for _, gpu in ends]  # fmt: skip
    between = curve.means not in (TO_HOST, FROM_HOST)
    if between and (machine.nvlink is True or (machine.nvlink is not False and any(fast))):
        return min(fast), "NVLink of a card"
    found = []
    for place, gpu in ends:
        rate = gpu.link if isinstance(gpu.link, Unknown) else gpu.link.bytes_per_s()
        if isinstance(rate, Unknown):
            return 0.0, ""
        found.append((rate, f"the link of GPU {place}"))
    return min(found)


def _sent(curve: Curve, size: int) -> float:
    """Bytes that cross the link of a rank one way, at least; 0 where the operation is not known."""
    if curve.operation in _SENDS_ONCE:
        return float(size)
    ranks = len(curve.gpus)
    return _TIMES_SENT.get(curve.operation, 0.0) * (ranks - 1) / ranks * size


def _named(curve: Curve) -> str:
    places = ", ".join(map(str, curve.gpus))
    return f"'{curve.means} {curve.operation}' of GPUs {places}"


def _differ(one: int | Unknown, other: int | Unknown) -> bool:
    return not isinstance(one, Unknown) and not isinstance(other, Unknown) and one != other


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


CHECKS = (
    Check(_IMPOSSIBLE, "Does the record hold what no such machine can be?", impossible),
    Check(_CONTRADICTING, "Do values of the record contradict each other?", contradicting),
)
