"""Links: are cards at the width and generation that they and their slots could have?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from metainfer.doctor.estimate import gain
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.facts import NOT_ASKED, Unknown
from metainfer.hardware.machine import Gpu, Machine, gpus_of
from metainfer.hardware.pcie import PcieLink
from metainfer.hardware.topology import shared_uplinks

_WIDTH = "link width"
_GENERATION = "link generation"
_UPLINK = "shared uplinks"


def width(patient: Patient) -> Iterator[Finding]:
    """A width below what card and slot could do does not come back by itself."""
    fine = 0
    for place, gpu, link in _links(patient):
        if isinstance(link, Unknown):
            yield _unknown(_WIDTH, place, gpu, link)
            continue
        if isinstance(link.width, Unknown) or isinstance(link.most_width, Unknown):
            why = link.width if isinstance(link.width, Unknown) else link.most_width
            assert isinstance(why, Unknown)
            yield _unknown(_WIDTH, place, gpu, why)
        elif link.width < link.most_width:
            lost = 1 - link.width / link.most_width
            yield Finding(
                _WIDTH,
                Level.FAIL if lost >= 0.5 else Level.WARN,
                f"GPU {place} ({gpu.name}) is linked over {link.width} of {link.most_width} lanes",
                f"{_bus(gpu)}: width {link.width}, possible {link.most_width}",
                f"everything that it sends or receives takes {link.most_width / link.width:.3g}"
                " times as long, and collectives wait for the slowest card"
                + _said(gain(patient, patient.machine, _widened(patient.machine), "at full width")),
                "reseat the card and its riser; look in the board's manual whether another slot"
                " takes lanes from this one, and in its firmware for bifurcation of the slot",
            )
        else:
            fine += 1
    if fine:
        yield Finding(
            _WIDTH, Level.OK, f"{fine} link{'s' * (fine != 1)} of full width", "widths as possible"
        )


def generation(patient: Patient) -> Iterator[Finding]:
    """A generation below the possible one is normal while a card idles, a fault while it works."""
    lowered: list[str] = []
    fine = 0
    for place, gpu, link in _links(patient):
        if isinstance(link, Unknown):
            continue  # the width says so
        now, most = link.generation, link.most_generation
        if isinstance(now, Unknown) or isinstance(most, Unknown):
            why = now if isinstance(now, Unknown) else most
            assert isinstance(why, Unknown)
            yield _unknown(_GENERATION, place, gpu, why)
        elif now < most and _works(gpu):
            yield Finding(
                _GENERATION,
                Level.FAIL,
                f"GPU {place} ({gpu.name}) works, and its link runs at generation {now} of {most}",
                f"{_bus(gpu)}: generation {now}, possible {most}, utilisation {gpu.utilisation}",
                f"its link carries {2 ** (most - now)} times less than it could"
                + _said(gain(patient, _as_slow(patient.machine), patient.machine, "at full speed")),
                "set the slot's speed by hand in the firmware; with risers or long cables try a"
                " generation less everywhere: errors on the link make it fall back by itself",
            )
        elif now < most:
            lowered.append(f"GPU {place}: {now} of {most}")
        else:
            fine += 1
    if lowered:
        yield Finding(
            _GENERATION,
            Level.UNKNOWN,
            f"{len(lowered)} links run below their generation while their cards idle, as they may",
            "; ".join(lowered),
            "whether they come up under load shows only under load",
            "run `metainfer probe --measure`, or probe again while the cards work",
        )
    elif fine:
        yield Finding(
            _GENERATION,
            Level.OK,
            f"{fine} link{'s' * (fine != 1)} at full generation",
            "as possible",
        )


def uplinks(patient: Patient) -> Iterator[Finding]:
    """Cards below one switch share its way up: traffic to others is divided among them."""
    shared = shared_uplinks(patient.machine)
    if isinstance(shared, Unknown) or isinstance(patient.machine.bridges, Unknown):
        return
    links = {bridge.name: bridge.link for bridge in patient.machine.bridges}
    for name, places in shared.items():
        link = links[name]
        rate = link if isinstance(link, Unknown) else link.bytes_per_s()
        each = "" if isinstance(rate, Unknown) else f", {rate / len(places) / 1e9:.1f} GB/s each"
        listed = ", ".join(map(str, places))
        yield Finding(
            _UPLINK,
            Level.OK,
            f"GPUs {listed} share the way up from {name}{each}",
            f"{len(places)} cards below one link",
            "a ring through neighbours below one switch sends over it once; an all-to-all pattern"
            " sends over it once for every pair",
        )


def _widened(machine: Machine) -> Machine:
    """With every lane that its links could have."""
    return _with_links(machine, lambda link: replace(link, width=link.most_width))


def _as_slow(machine: Machine) -> Machine:
    """With links of cards that work held to the generation that they run at."""
    return _with_links(machine, lambda link: replace(link, most_generation=link.generation), _works)


def _with_links(
    machine: Machine,
    change: Callable[[PcieLink], PcieLink],
    chosen: Callable[[Gpu], bool] = lambda gpu: True,
) -> Machine:
    gpus = tuple(
        replace(gpu, link=change(gpu.link))
        if isinstance(gpu.link, PcieLink) and chosen(gpu)
        else gpu
        for gpu in gpus_of(machine)
    )
    return replace(machine, gpus=gpus)


def _said(estimate: str) -> str:
    return f"; {estimate}" if estimate else ""


def _links(patient: Patient) -> Iterator[tuple[int, Gpu, PcieLink | Unknown]]:
    for place, gpu in enumerate(gpus_of(patient.machine)):
        yield place, gpu, gpu.link


def _bus(gpu: Gpu) -> str:
    return "place on the bus not known" if isinstance(gpu.bus_id, Unknown) else gpu.bus_id


def _works(gpu: Gpu) -> bool:
    return not isinstance(gpu.utilisation, Unknown) and gpu.utilisation > 0.05


def _unknown(check: str, place: int, gpu: Gpu, why: Unknown) -> Finding:
    fix = "probe the machine itself" if why == NOT_ASKED else ""
    return Finding(check, Level.UNKNOWN, f"{check} of GPU {place} is not known", why.why, fix=fix)


CHECKS = (
    Check(_WIDTH, "Do cards have all lanes that they could have?", width),
    Check(_GENERATION, "Do links run at the generation that they could?", generation),
    Check(_UPLINK, "Which cards share a link, and what does each get?", uplinks),
)
