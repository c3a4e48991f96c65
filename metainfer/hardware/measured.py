"""What was measured on the machine at hand: kept in the user's cache by the machine's fingerprint.

It counts for as long as cards, links and driver, the packages that move bytes and the variables
that steer them are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from metainfer.core.errors import UserError
from metainfer.hardware.coherence import require_measurements
from metainfer.hardware.curves import (
    COPY,
    LOAD,
    MEASURED_HERE,
    PULL,
    RING,
    SEVERAL_ROOTS,
    STORE,
    Curve,
    Rate,
    trusted,
)
from metainfer.hardware.facts import Unknown, plain, record_of
from metainfer.hardware.machine import Machine, Source
from metainfer.hardware.topology import fingerprint

_VERSION = 1
_PACKAGES = ("metainfer", "torch", "triton")
_STEERING = ("NCCL_", "CUDA_")
_COLLAPSED = 0.4
"""Share of what loads reach under which stores have collapsed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Attributes:
    date: on which, "2026-01-31".
    versions, environment: of packages and of variables that it counts for.
    curves, rates, unmeasured: as of `Machine`.
    """

    date: str
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    curves: tuple[Curve, ...]
    rates: tuple[Rate, ...]
    unmeasured: tuple[str, ...]

    def of(self, machine: Machine) -> Machine:
        """The machine with what was measured of it."""
        source = Source("curves, rates", f"{MEASURED_HERE}, {self.date}")
        return replace(
            machine,
            curves=self.curves,
            rates=self.rates,
            unmeasured=self.unmeasured,
            sources=(*machine.sources, source),
        )


def default_cache() -> Path:
    return Path.home() / ".cache" / "metainfer" / "measured"


def conditions(machine: Machine) -> tuple[dict[str, str], dict[str, str]]:
    """Versions and variables that measurements of `machine` count for."""
    versions = {name: machine.versions[name] for name in _PACKAGES if name in machine.versions}
    steering = {n: v for n, v in machine.environment.items() if n.startswith(_STEERING)}
    return versions, steering


def write_measured(machine: Machine, measured: Measured, cache: Path | None = None) -> Path:
    """Keep it; returns the file. Raises OSError."""
    path = _path(machine, cache)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = path.with_suffix(".part")
    record = {"version": _VERSION, **plain(measured)}
    unfinished.write_text(json.dumps(record, indent=1), encoding="utf-8")
    unfinished.replace(path)
    return path


def read_measured(machine: Machine, cache: Path | None = None) -> Measured | str:
    """What is kept of `machine`, or why nothing of it counts."""
    if isinstance(machine.gpus, Unknown) or not machine.gpus:
        return "the machine has no GPU"
    try:
        record = json.loads(_path(machine, cache).read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.pop("version", None) != _VERSION:
            return "what is kept is of another version"
        measured: Measured = record_of(Measured, record)
        require_measurements(measured.curves, measured.rates, len(machine.gpus))
    except FileNotFoundError:
        return "nothing was measured yet"
    except (OSError, ValueError, RecursionError, UserError) as error:
        return f"what is kept cannot be read: {error}"
    return _changed(machine, measured) or measured


def _changed(machine: Machine, measured: Measured) -> str:
    """Why what is kept does not count; "" where it does."""
    versions, environment = conditions(machine)
    for kept, now, what in (
        (measured.versions, versions, "version"),
        (measured.environment, environment, "variable"),
    ):
        changed = sorted(n for n in {*kept, *now} if kept.get(n) != now.get(n))
        if changed:
            word = f"{changed[0]} was {kept.get(changed[0], 'not there')}"
            return f"what is kept, of {measured.date}, is of another {what}: {word}"
    return ""


def with_measured(machine: Machine, cache: Path | None = None) -> Machine:
    """The machine with what is kept of it, where that counts."""
    measured = read_measured(machine, cache)
    return machine if isinstance(measured, str) else measured.of(machine)


def _path(machine: Machine, cache: Path | None) -> Path:
    return (cache or default_cache()) / f"{fingerprint(machine)}.json"


def sentences(machine: Machine) -> list[str]:
    """What curves that were measured here say of the machine."""
    ours = [curve for curve in machine.curves if curve.source.startswith(MEASURED_HERE)]
    return [*_wrong(ours), *_collapse(ours), *_push_or_pull(ours)]


def _wrong(curves: list[Curve]) -> Iterator[str]:
    for curve in curves:
        if not curve.trusted:
            why = curve.source.partition(": ")[2]
            yield f"{name_of(curve)}: wrong data arrives, so it is not used ({why})"


def _collapse(curves: list[Curve]) -> Iterator[str]:
    """Stores of several sources to several roots, beside loads over the same ways."""
    rates = {
        curve.means: rate_of(curve)
        for curve in trusted(curves)
        if curve.operation == SEVERAL_ROOTS and curve.means in (STORE, LOAD)
    }
    if len(rates) < 2:
        return
    stores, loads = rates[STORE] / 1e9, rates[LOAD] / 1e9
    if stores < _COLLAPSED * loads:
        yield f"stores to several roots collapse: {stores:.1f} GB/s where loads make {loads:.1f}"
    else:
        yield f"stores to several roots do not collapse: {stores:.1f} GB/s, loads {loads:.1f}"


def _push_or_pull(curves: list[Curve]) -> Iterator[str]:
    """Whether whoever has the bytes or whoever wants them had better move them."""
    for push, pull, what in (
        ((STORE, "copy"), (LOAD, "copy"), "kernels, one pair"),
        ((STORE, RING), (LOAD, RING), "kernels, all at once"),
        ((COPY, "copy"), (COPY, PULL), "copy engine, one pair"),
    ):
        found = []
        for means, operation in (push, pull):
            fits = [c for c in trusted(curves) if (c.means, c.operation) == (means, operation)]
            found.append({c.gpus: rate_of(c) for c in fits if c.at_once == (operation == RING)})
        both = sorted(found[0].keys() & found[1].keys())
        if both:
            pushed, pulled = (min(rates[gpus] for gpus in both) / 1e9 for rates in found)
            yield f"{what}: push {pushed:.1f} GB/s, pull {pulled:.1f} (the slowest of {len(both)})"


def rate_of(curve: Curve) -> float:
    """Bytes a second of its largest transfer."""
    return curve.bytes[-1] / curve.seconds[-1]


def name_of(curve: Curve) -> str:
    """ "peer store, copy over 0,1 at once"."""
    together = " at once" if curve.at_once else ""
    return f"{curve.means}, {curve.operation} over {','.join(map(str, curve.gpus))}{together}"
