"""What `bench comm` found of ranks on this machine, kept in the user's cache for plans.

It counts for the machine's fingerprint, the number of ranks and their threads, and the versions of
the packages that move bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.hardware.machine import Machine
from metainfer.hardware.measured import conditions
from metainfer.hardware.topology import fingerprint
from metainfer.plan.routes import Rival

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Way:
    """What was found of a way to do an operation, its payload verified before it was timed.

    Attributes:
        wire: in which form numbers travelled, one of `plan.wires.WIRES`.
        rival: how long the slowest rank took; why it cannot be taken, where wrong data arrived.
    """

    operation: str
    wire: str
    rival: Rival


@dataclass(frozen=True, slots=True)
class Compared:
    """Attributes:
    date: on which, "2026-01-31".
    """

    date: str
    ways: tuple[Way, ...]


def default_cache() -> Path:
    return Path.home() / ".cache" / "metainfer" / "comm"


def keep(
    machine: Machine, ranks: int, threads: int, date: str, ways: Sequence[Way],
    cache: Path | None = None,
) -> Path:  # fmt: skip
    """In place of what was kept of so many ranks; returns the file. Raises OSError.

    Args:
        threads: of each rank.
    """
    path = _path(machine, ranks, cache)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    record = {
        "version": _VERSION,
        "date": date[:10],
        "threads": threads,
        "versions": conditions(machine)[0],
        "ways": [_plain(way) for way in ways],
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(record, indent=1), encoding="utf-8")
    unfinished.replace(path)
    return path


def _plain(way: Way) -> dict[str, Any]:
    rival = way.rival
    return {
        "operation": way.operation,
        "wire": way.wire,
        "name": rival.name,
        "bytes": rival.bytes,
        "seconds": rival.seconds,
        "ordered": rival.ordered,
        "why_not": rival.why_not,
    }


def read(machine: Machine, ranks: int, threads: int, cache: Path | None = None) -> Compared | str:
    """What is kept of so many ranks, or why nothing of it counts."""
    command = f"`metainfer bench comm --ranks {ranks}`"
    try:
        record = json.loads(_path(machine, ranks, cache).read_text(encoding="utf-8"))
        if record["version"] != _VERSION:
            return f"what {command} kept is of another version"
        kept = Compared(str(record["date"]), tuple(_way(told) for told in record["ways"]))
        same = record["versions"], record["threads"]
    except FileNotFoundError:
        return f"{command} was not run here"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"what {command} kept cannot be read: {error}"
    if same[0] != conditions(machine)[0]:
        return f"what {command} kept on {kept.date} is of other versions"
    if same[1] != threads:
        return f"what {command} kept is of {same[1]} threads a rank, and the plan has {threads}"
    return kept


def _way(told: Mapping[str, Any]) -> Way:
    sizes = tuple(int(size) for size in told["bytes"])
    seconds = tuple(float(second) for second in told["seconds"])
    if len(sizes) != len(seconds) or list(sizes) != sorted(sizes):
        raise ValueError(f"{told['name']} has no time for each size")
    rival = Rival(
        str(told["name"]),
        sizes,
        seconds,
        ordered=told["ordered"] is True,
        why_not=str(told["why_not"]),
    )
    return Way(str(told["operation"]), str(told["wire"]), rival)


def _path(machine: Machine, ranks: int, cache: Path | None) -> Path:
    return (cache or default_cache()) / f"{fingerprint(machine)}-{ranks}.json"
