"""A Machine in lines of at most 100 columns: cards, the tree they hang in, what pairs may do."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

from metainfer.core.units import format_bytes
from metainfer.hardware.curves import Curve
from metainfer.hardware.facts import NOT_ASKED, Unknown
from metainfer.hardware.machine import Gpu, Machine, Power
from metainfer.hardware.measured import name_of, sentences
from metainfer.hardware.pcie import Bridge, PcieLink, Peer
from metainfer.hardware.topology import way

_UNKNOWN = "?"


def machine_lines(machine: Machine) -> list[str]:
    """All that is known of GPUs and of how they talk, and at the end why the rest is not."""
    lines: list[str] = []
    unknown: Counter[str] = Counter()
    if isinstance(machine.gpus, Unknown):
        return [f"GPUs: unknown ({machine.gpus.why})"]
    if not machine.gpus:
        return ["GPUs: none"]
    lines += _table(machine, unknown)
    lines += _tree(machine, unknown)
    lines += _pairs(machine, unknown)
    lines += _host(machine, unknown)
    lines += [f"environment  {name}={value}" for name, value in machine.environment.items()]
    lines += _measured(machine)
    lines += [f"unknown      {what}" for what in unknown]
    return lines


def _table(machine: Machine, unknown: Counter[str]) -> Iterator[str]:
    assert not isinstance(machine.gpus, Unknown)
    columns = ("card", "sm", "SMs", "memory", "free", "link", "W", "busy")
    yield "GPU  {:<36} {:<4} {:<4} {:<9} {:<9} {:<11} {:<4} {}".format(*columns)
    for place, gpu in enumerate(machine.gpus):
        major, minor = gpu.capability
        tell = _Teller(f"gpu {place}", unknown)
        limit = gpu.power.limit_w if isinstance(gpu.power, Power) else gpu.power
        busy = tell(gpu.utilisation, "utilisation", lambda share: f"{share:.0%}")
        cells = (
            f"{place:<4} {gpu.name[:36]:<36} {major}{minor:<3}",
            f"{tell(gpu.multiprocessors, 'SMs'):<4}",
            f"{format_bytes(gpu.memory_bytes):<9} {format_bytes(gpu.free_bytes):<9}",
            f"{_link(gpu.link, tell):<11}",
            f"{tell(limit, 'power limit', lambda watts: f'{watts:.0f}'):<4}",
            busy,
        )
        yield " ".join(cells).rstrip()
        yield from _conditions(gpu)


def _conditions(gpu: Gpu) -> Iterator[str]:
    """What is out of the ordinary about one card."""
    if isinstance(gpu.throttle, tuple) and set(gpu.throttle) - {"idle"}:
        yield f"     clocks lowered: {', '.join(gpu.throttle)}"
    if gpu.mig is True:
        yield "     split by MIG"
    for process in () if isinstance(gpu.processes, Unknown) else gpu.processes:
        name = _UNKNOWN if isinstance(process.name, Unknown) else process.name
        held = process.memory_bytes
        size = "memory" if isinstance(held, Unknown) else format_bytes(held)
        yield f"     process {process.pid} ({name}) holds {size}"


def _tree(machine: Machine, unknown: Counter[str]) -> Iterator[str]:
    """Roots, switches below them, cards below those."""
    if isinstance(machine.bridges, Unknown):
        unknown[f"the PCIe tree: {machine.bridges.why}"] += 1
        return
    assert not isinstance(machine.gpus, Unknown)
    yield ""

    def below(name: str | None, depth: int) -> Iterator[str]:
        assert not isinstance(machine.bridges, Unknown) and not isinstance(machine.gpus, Unknown)
        for bridge in machine.bridges:
            if bridge.parent == name:
                yield "  " * depth + _bridge(bridge, unknown)
                yield from below(bridge.name, depth + 1)
        for place, gpu in enumerate(machine.gpus):
            if gpu.parent == name and name is not None:
                tell = _Teller(f"gpu {place}", unknown)
                yield "  " * depth + f"gpu {place}, PCIe {_link(gpu.link, tell)}"

    yield from below(None, 0)


def _bridge(bridge: Bridge, unknown: Counter[str]) -> str:
    tell = _Teller(bridge.name, unknown)
    text = f"{bridge.kind} {bridge.name}"
    if bridge.parent is None:
        text += "" if isinstance(bridge.numa_node, Unknown) else f", NUMA node {bridge.numa_node}"
    elif not isinstance(bridge.link, Unknown):
        text += f", PCIe {_link(bridge.link, tell)}"
    return text + (", ACS sends peers' traffic up" if bridge.acs_redirects is True else "")


def _pairs(machine: Machine, unknown: Counter[str]) -> Iterator[str]:
    """The matrix of pairs: the way, and "-" where the driver allows no access."""
    assert not isinstance(machine.gpus, Unknown)
    count = len(machine.gpus)
    if count < 2:
        return
    peers: dict[tuple[int, int], Peer] = {}
    if isinstance(machine.peers, Unknown):
        unknown[f"which pairs reach each other's memory: {machine.peers.why}"] += 1
    else:
        peers = {(peer.source, peer.target): peer for peer in machine.peers}
    yield ""
    yield "to    " + "".join(f"{target:<6}" for target in range(count))
    for source in range(count):
        cells = [
            "." if source == target else _pair(machine, source, target, peers.get((source, target)))
            for target in range(count)
        ]
        yield f"{source:<6}" + "".join(f"{cell:<6}" for cell in cells).rstrip()
    yield "PIX, PXB below switches; NODE one processor; SYS two; -: no access to the other's memory"
    refused = {peer.why for peer in peers.values() if peer.p2p is False}
    yield from (f"no access: {why}" for why in sorted(refused))
    if machine.nvlink is True:
        yield "some pairs are linked by NVLink"


def _pair(machine: Machine, source: int, target: int, peer: Peer | None) -> str:
    between = way(machine, source, target)
    kind = _UNKNOWN if isinstance(between, Unknown) else between.kind
    return f"{kind}-" if peer is not None and peer.p2p is False else kind


def _host(machine: Machine, unknown: Counter[str]) -> Iterator[str]:
    host, tell = machine.host, _Teller("", unknown)
    rows = [
        ("driver", tell(machine.driver, "the driver")),
        ("board", tell(host.board, "the board")),
        ("sockets", tell(host.sockets, "sockets")),
        ("NUMA nodes", tell(host.numa_nodes, "NUMA nodes", lambda nodes: str(len(nodes)))),
        ("IOMMU", tell(host.iommu, "IOMMU")),
        ("HMM", tell(host.hmm, "HMM", lambda on: "on" if on else "off")),
        (
            "kernel",
            tell(host.kernel_parameters, "kernel parameters") or "nothing that matters",
        ),
    ]
    yield ""
    yield from (f"{label:<12} {text}"[:100] for label, text in rows)


def _measured(machine: Machine) -> Iterator[str]:
    if machine.curves:
        yield ""
    numbers: dict[str, int] = {}  # of sources, which many lines share
    for curve in machine.curves:
        if curve.trusted and curve.bytes:
            yield from _wrapped(f"{_curve(curve)} [{_number(numbers, curve.source)}]")
    for sentence in sentences(machine):
        yield from _wrapped(sentence)
    for rate in machine.rates:
        rows = f", {rate.rows} rows" if rate.rows else ""
        unit = "B/s" if rate.work == "copy" else "operations/s"
        number = _number(numbers, rate.source)
        yield from _wrapped(f"{rate.work}{rows}: {rate.per_s:.3g} {unit} [{number}]")
    if numbers:
        yield ""
    for source, number in numbers.items():
        yield from _wrapped(f"[{number}] {source}", " " * 4)
    for what in machine.unmeasured:
        yield from textwrap.wrap(
            f"not measured {what}", 100, subsequent_indent=" " * len("not measured ")
        )


def _number(numbers: dict[str, int], source: str) -> int:
    """Of a source; the next one where it has none yet."""
    return numbers.setdefault(source, len(numbers) + 1)


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_on_hyphens=False)


def _curve(curve: Curve) -> str:
    best = max(size / time for size, time in zip(curve.bytes, curve.seconds, strict=True))
    return (
        f"{name_of(curve)}: {curve.seconds[0] * 1e6:.1f} us"
        f" for {format_bytes(curve.bytes[0])}, up to {best / 1e9:.1f} GB/s"
    )


def _link(link: PcieLink | Unknown, tell: _Teller) -> str:
    """ "5x16", "1x8 of 5x16" where it could do more."""
    if isinstance(link, Unknown):
        return tell(link, "link")
    now = f"{tell(link.generation, 'link')}x{tell(link.width, 'link')}"
    most = (link.most_generation, link.most_width)
    if any(isinstance(fact, Unknown) for fact in most) or most == (link.generation, link.width):
        return now
    return f"{now} of {most[0]}x{most[1]}"


class _Teller:
    """Says facts, and counts those that are not known with the why."""

    def __init__(self, whose: str, unknown: Counter[str]) -> None:
        self._whose, self._unknown = whose, unknown

    def __call__(self, fact: Any, what: str, say: Any = str) -> str:
        if not isinstance(fact, Unknown):
            return str(say(fact))
        if fact != NOT_ASKED:
            self._unknown[f"{self._whose} {what}: {fact.why}".strip()] += 1
        return _UNKNOWN
