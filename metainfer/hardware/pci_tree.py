"""The PCIe tree above the GPUs, as sysfs shows it: all bridges between a card and its root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Gpu
from metainfer.hardware.pcie import Bridge, PcieLink

_DEVICES = "sys/bus/pci/devices"
_CONFIG_HEADER_BYTES = 256
_EXTENDED_START = 0x100
_ACS_CAPABILITY = 0x0D
_ACS_CONTROL_OFFSET = 6
_ACS_REDIRECTS = 0x04 | 0x08  # requests and completions between peers
# Transfers a second, as the kernel writes them -> generation.
_GENERATION = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


def read_tree(
    root: Path, gpus: Sequence[Gpu]
) -> tuple[tuple[Gpu, ...], tuple[Bridge, ...] | Unknown]:
    """The GPUs with their place in the tree, and the bridges above them, the upper ones first.

    Args:
        root: "/" but for tests.
    """
    if not gpus:
        return (), ()
    if not (root / _DEVICES).is_dir():
        return tuple(gpus), Unknown("there is no /sys/bus/pci here")
    bridges: dict[str, Bridge] = {}
    placed = []
    for gpu in gpus:
        if isinstance(gpu.bus_id, Unknown):
            return tuple(gpus), gpu.bus_id
        chain = _chain(root, gpu.bus_id)
        if isinstance(chain, Unknown):
            return tuple(gpus), chain
        above = chain[:-1]
        for depth, name in enumerate(above):
            parent = above[depth - 1] if depth else None
            bridges.setdefault(name, _bridge(root, name, parent))
        numa = _numa_node(root, gpu.bus_id)
        placed.append(replace(gpu, parent=above[-1] if above else None, numa_node=numa))
    return tuple(placed), tuple(bridges.values())


def _chain(root: Path, bus_id: str) -> list[str] | Unknown:
    """Places on the bus from the root port down to the device."""
    try:
        path = (root / _DEVICES / bus_id).resolve(strict=True)
    except OSError:
        return Unknown(f"{bus_id} is not in /sys/bus/pci: a container or virtual machine hides it")
    # .../devices/pci0000:40/0000:40:01.1/0000:41:00.0: parts with two colons and a dot are devices.
    return [part for part in path.parts if part.count(":") == 2 and "." in part]


def _bridge(root: Path, name: str, parent: str | None) -> Bridge:
    return Bridge(
        name,
        kind="root" if parent is None else "switch",
        parent=parent,
        numa_node=_numa_node(root, name),
        link=Unknown("it is the root") if parent is None else read_link(root, name),
        acs_redirects=_acs_redirects(root, name),
    )


def read_link(root: Path, bus_id: str) -> PcieLink:
    """The link above a device."""

    def number(name: str) -> int | Unknown:
        text = _text(root, bus_id, name)
        # 0: there is a port, but no link that it would know of, as below virtual machines.
        known = text.isdigit() and int(text) > 0
        return int(text) if known else Unknown(f"sysfs has no {name} of {bus_id}")

    def generation(name: str) -> int | Unknown:
        rate = _text(root, bus_id, name).partition(" ")[0]
        return _GENERATION.get(rate, Unknown(f"{name} of {bus_id} is '{rate or 'missing'}'"))

    return PcieLink(
        generation("current_link_speed"),
        number("current_link_width"),
        generation("max_link_speed"),
        number("max_link_width"),
    )


def _numa_node(root: Path, bus_id: str) -> int | Unknown:
    text = _text(root, bus_id, "numa_node")
    if text.lstrip("-").isdigit() and int(text) >= 0:
        return int(text)
    return Unknown("the firmware does not say, as where there is a single node")


def _acs_redirects(root: Path, bus_id: str) -> bool | Unknown:
    """From the bridge's configuration space (PCI Express base specification, 7.7.11)."""
    try:
        space = (root / _DEVICES / bus_id / "config").read_bytes()
    except OSError as error:
        return Unknown(f"its configuration space cannot be read: {error.strerror}")
    if len(space) <= _CONFIG_HEADER_BYTES:
        return Unknown("only the administrator may read all of its configuration space")
    place = _EXTENDED_START
    for _ in range(64):  # a list that ends; broken ones go in circles
        header = int.from_bytes(space[place : place + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            control = place + _ACS_CONTROL_OFFSET
            return bool(int.from_bytes(space[control : control + 2], "little") & _ACS_REDIRECTS)
        place = header >> 20
        if place < _EXTENDED_START:
            return False  # it has no access control
    return Unknown("its list of capabilities does not end")


def _text(root: Path, bus_id: str, name: str) -> str:
    """A file of a device; empty where it cannot be read."""
    try:
        path = root / _DEVICES / bus_id / name
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
