"""Visible cards: those of a machine that CUDA_VISIBLE_DEVICES leaves to a process.

CUDA takes entries up to the first that names no card: a number, or the beginning of a GPU's UUID.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Gpu, Machine

VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, slots=True)
class Shown:
    """Attributes:
    places: in `Machine.gpus`, in the order in which the process counts them.
    doubt: what of them is taken for granted, in a sentence; "" for nothing.
    """

    places: tuple[int, ...]
    doubt: str = ""


def shown_by(value: str, gpus: Sequence[Gpu], by_bus: bool = False) -> Shown:
    """The cards that a value of the variable shows.

    Args:
        by_bus: numbers are in the order of the bus, as the driver lists cards; else CUDA counts
            the fastest first.
    """
    places: list[int] = []
    nameless = numbered = False
    for entry in map(str.strip, value.split(",")):
        place = _named(entry, gpus)
        if place is None and entry.startswith(("GPU-", "MIG-")) and not _all_known(entry, gpus):
            nameless = True
            place = next((n for n in range(len(gpus)) if n not in places), None)
        if place is None or place in places:
            break
        numbered = numbered or entry.isdigit()
        places.append(place)
    doubt = ""
    if nameless:
        doubt = "which cards its names mean is not recorded, so the first are taken"
    elif numbered and not by_bus and len({gpu.name for gpu in gpus}) > 1:
        doubt = f"cards differ, so set {_ORDER}=PCI_BUS_ID to have them counted as here"
    return Shown(tuple(places), doubt)


def _named(entry: str, gpus: Sequence[Gpu]) -> int | None:
    """The card of a number or of the beginning of a UUID."""
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(gpus) else None
    if not entry.startswith("GPU-"):
        return None
    fitting = [n for n, gpu in enumerate(gpus) if str(gpu.uuid).startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def _all_known(entry: str, gpus: Sequence[Gpu]) -> bool:
    """Whether a UUID that no card has names none; a slice (MIG) is of a card that nobody knows."""
    return entry.startswith("GPU-") and not any(isinstance(gpu.uuid, Unknown) for gpu in gpus)


def shown_machine(machine: Machine, value: str | None, whose: str = "") -> tuple[Machine, str]:
    """The machine with the cards that `value` shows, and the sentence that says so; as it is, and
    "", where it shows all in their order.

    Args:
        value: of the variable; None where it is not set.
        whose: begins the sentence, such as "the command's ".
    """
    gpus = machine.gpus
    if value is None or isinstance(gpus, Unknown) or not gpus:
        return machine, ""
    by_bus = machine.environment.get(_ORDER) == "PCI_BUS_ID"
    shown = shown_by(value, gpus, by_bus)
    places, said = shown.places, f"{whose}{VARIABLE}={value:.60}"
    if places == tuple(range(len(gpus))):
        return machine, ""
    if not places:
        return replace(machine, gpus=Unknown(f"{said} shows none of {len(gpus)} GPUs")), ""
    listed = ", ".join(map(str, places))
    sentence = f"{said}: planned for {len(places)} of {len(gpus)} GPUs ({listed})"
    sentence += f"; {shown.doubt}" if shown.doubt else ""
    return _with_cards(machine, gpus, places), sentence


def _with_cards(machine: Machine, gpus: Sequence[Gpu], places: tuple[int, ...]) -> Machine:
    """Cards, pairs and curves of those alone, counted anew."""
    new = {old: place for place, old in enumerate(places)}
    peers = machine.peers
    if not isinstance(peers, Unknown):
        peers = tuple(
            replace(peer, source=new[peer.source], target=new[peer.target])
            for peer in peers
            if peer.source in new and peer.target in new
        )
    curves = tuple(
        replace(curve, gpus=tuple(new[old] for old in curve.gpus))
        for curve in machine.curves
        if new.keys() >= set(curve.gpus)
    )
    nvlink = False if len(places) < 2 else machine.nvlink
    return replace(
        machine,
        environment={**machine.environment, VARIABLE: ",".join(map(str, places))},
        gpus=tuple(gpus[old] for old in places),
        peers=peers,
        curves=curves,
        nvlink=nvlink,
    )


def numbers_of(machine: Machine) -> list[str]:
    """By which the variable names each card of a machine as `shown_machine` makes it, or of any."""
    count = 0 if isinstance(machine.gpus, Unknown) else len(machine.gpus)
    given = machine.environment.get(VARIABLE, "").split(",")
    if len(given) == count and all(entry.isdigit() for entry in given):
        return given
    return [str(place) for place in range(count)]
