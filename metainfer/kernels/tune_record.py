"""Records of tuning: what was found on which card, kept where `serve` looks for it.

A record counts for one kind of processor (architecture and number of multiprocessors), one driver,
one set of versions and of kernel sources; the name of a device is kept to be read and decides
nothing. One file for each of these; operations that are tuned again are replaced in it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from metainfer.core.errors import UserError
from metainfer.core.files import replace_file, require_ours
from metainfer.hardware.machine import Clocks, Machine, Unknown
from metainfer.kernels import verify_record
from metainfer.kernels.record_fields import (
    CASE,
    COUNT,
    POSITIVE,
    TEXT,
    by_name,
    each,
    fields,
    one_line,
    require_fields,
)
from metainfer.kernels.tune_run import Finding
from metainfer.kernels.tuned import NOT_TUNED, Key, Measured, Timing, Tuned, case_text
from metainfer.kernels.verify_record import card_facts, read_signed, sign
from metainfer.ops.base import Target, case_fields
from metainfer.ops.catalogue import OPS
from metainfer.plan import tuning
from metainfer.plan.plan import Plan
from metainfer.plan.tuning import Tuning

KIND = "metainfer kernels tune"
VERSION = 1

_FIELDS = fields(
    card=fields(device=TEXT),
    entries=each(
        fields(
            op=TEXT,
            op_version=COUNT,
            case=CASE,
            caches=TEXT,
            threads=COUNT,
            date=TEXT,
            sizes=each(fields(rows=POSITIVE, tokens=each(COUNT), seconds=by_name(POSITIVE))),
            bad=by_name(TEXT),
        )
    ),
)

# What a record is for, and how one for another is told: with its fact, and with the one here.
_DECIDING: Mapping[str, str] = {
    "device": "tuned on {}, this is {}",
    "code_for": "tuned for the code of {}, this is that of {}",
    "capability": "tuned on sm_{}, this card is sm_{}",
    "multiprocessors": "tuned for {} SMs, this card has {}",
    "isa": "tuned with {}, this processor has {}",
    "driver": "tuned with driver {}, this is {}",
    "torch": "tuned with torch {}, this is {}",
    "triton": "tuned with triton {}, this is {}",
    "kernels": "tuned with kernels of other sources",
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """What else times depend on.

    Attributes:
        caches: format of caches that hold plain numbers.
        threads: of a step on a CPU; 0 on a GPU.
    """

    caches: str
    threads: int


def tune_facts(machine: Machine, device: str, gpu: int | None = None) -> dict[str, Any]:
    """What a record counts for, and what a reader wants to know of the card.

    Args:
        gpu: its number; None for the current one.
    """
    facts = card_facts(machine, device, gpu=gpu)
    if device == "cpu":
        isa = machine.cpu.isa
        return facts | {"isa": None if isinstance(isa, Unknown) else list(isa)}
    clocks: Any = None
    if not isinstance(machine.gpus, Unknown) and (gpu or 0) < len(machine.gpus):
        clocks = machine.gpus[gpu or 0].clocks
    most = clocks.most_memory_mhz if isinstance(clocks, Clocks) else None
    return facts | {"isa": None, "most_memory_mhz": most if isinstance(most, int) else None}


def key_of(facts: Mapping[str, Any]) -> str:
    """Names the file of a card and its versions."""
    return verify_record.key_of({name: facts.get(name) for name in _DECIDING})


def differences(card: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Why what was found on `card` does not count for the one of `facts`; [] where it does."""
    found = []
    for name, text in _DECIDING.items():
        theirs, ours = card.get(name), facts.get(name)
        if theirs != ours:
            told = text.format(_told(name, theirs), _told(name, ours))
            found.append(
                told.replace("SMs, this card has", "cores, this processor has")
                if facts.get("device") == "cpu"
                else told
            )
    return found


def _told(name: str, fact: Any) -> str:
    if isinstance(fact, list):
        return ("" if name == "capability" else " ").join(map(str, fact)) or "nothing"
    return "none" if fact is None else str(fact)


def keep(
    facts: Mapping[str, Any],
    conditions: Conditions,
    findings: Iterable[Finding],
    provenance: Mapping[str, Any],
    cache: Path | None = None,
) -> Path:
    """Add findings to the file of this card, in place of older ones. Raises OSError."""
    cache = cache or tuning.default_cache()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = cache / f"{key_of(facts)}.json"
    with _locked(cache):
        try:
            known = read(path.read_bytes())["entries"]
        except (OSError, UserError):
            known = []
        new = [entry(finding, conditions) for finding in findings]
        kept = {_entry_key(one): one for one in (*known, *new)}
        record = make_record(facts, list(kept.values()), provenance)
        replace_file(path, (json.dumps(record, indent=1) + "\n").encode())
    return path


def make_record(
    facts: Mapping[str, Any], entries: Sequence[Any], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """The signed record."""
    plain = {"kind": KIND, "version": VERSION, **provenance, "card": dict(facts)}
    return sign({**plain, "entries": list(entries)})


def entry(finding: Finding, conditions: Conditions) -> dict[str, Any]:
    """A finding as a record has it."""
    return {
        "op": finding.op,
        "op_version": OPS[finding.op].version,
        "case": case_fields(finding.case),
        **asdict(conditions),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sizes": [
            {
                "rows": size.rows,
                "tokens": list(size.tokens),
                "method": size.method,
                "seconds": dict(size.seconds),
            }
            for size in finding.sizes
        ],
        "bad": {name: one_line(why) for name, why in finding.bad},
    }


def _entry_key(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return one["op"], case_text(one["case"]), one["caches"], one["threads"]


def read(text: str | bytes) -> dict[str, Any]:
    """Raises UserError: it is no such record, was changed, or holds what no record does."""
    record = read_signed(text, KIND, VERSION)
    require_fields(record, _FIELDS)
    return record


@dataclass(frozen=True, slots=True)
class Found:
    """What the files say.

    Attributes:
        entries: that were found on such a card.
        others: (why it does not count, entry) of other cards and versions, the nearest first.
        broken: a sentence for each file that cannot be used at all.
        is_here: such a card is in this machine.
    """

    entries: tuple[Mapping[str, Any], ...] = ()
    others: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    broken: tuple[str, ...] = ()
    is_here: bool = True

    def tuning(self) -> Tuning:
        """As the plan tells it."""
        names = {(one["op"], case_text(one["case"])) for one in self.entries}
        if names:
            dates = sorted(one["date"] for one in self.entries)
            count = len(names)
            what = "1 operation was" if count == 1 else f"{count} operations were"
            return Tuning(count, f"{what} tuned on this card, the last on {dates[-1][:10]}")
        if self.others:
            return Tuning(0, self.others[0][0])
        return Tuning(0, "nothing was tuned on this card")

    def tuned(self, target: Target, conditions: Conditions | None = None) -> Tuned:
        """For a registry.

        Args:
            conditions: those that must hold; None for any, the latest first.
        """
        measured: dict[Key, Measured] = {}
        unused: dict[Key, str] = {}
        for why, one in reversed(self.others):
            unused[one["op"], case_text(one["case"])] = why
        for one in sorted(self.entries, key=lambda one: str(one["date"])):
            key = one["op"], case_text(one["case"])
            why = _unfit(one, conditions)
            if why:
                unused[key] = why
            else:
                timings = (Timing(size["rows"], size["seconds"]) for size in one["sizes"])
                ordered = tuple(sorted(timings, key=lambda timing: timing.rows))
                measured[key] = Measured(ordered, one["bad"])
        return Tuned(target, measured, unused, NOT_TUNED if self.is_here else "")

    def bound(self, plan: Plan, target: Target) -> Tuned:
        """What layers of a plan are to bind by."""
        if plan.tuned_kernels.value == "off":
            return Tuned(target, note=plan.tuned_kernels.reason)
        return self.tuned(target, Conditions(plan.plain_cache_dtype, plan.threads.value))


def _unfit(one: Mapping[str, Any], conditions: Conditions | None) -> str:
    """Why an entry of this card does not count; "" where it does."""
    if one["op_version"] != OPS[one["op"]].version:
        return f"tuned for version {one['op_version']} of its contract"
    if conditions is None:
        return ""
    if one["caches"] != conditions.caches:
        return f"tuned with caches in {one['caches']}, these are in {conditions.caches}"
    if one["threads"] != conditions.threads:
        return f"tuned with {one['threads']} threads, these are {conditions.threads}"
    return ""


def find_here(machine: Machine, target: Target, gpu: int | None = None) -> Found:
    """What was kept for `target`, if that is what this machine runs natively.

    Args:
        gpu: as of `tune_facts`.
    """
    if target.type == "cuda" and (
        not torch.cuda.is_available() or torch.cuda.get_device_capability(gpu) != target.capability
    ):
        return Found(is_here=False)
    return find(tune_facts(machine, target.type, gpu))


def find(facts: Mapping[str, Any], cache: Path | None = None) -> Found:
    """What was kept. A file that cannot be read counts for nothing, and is told."""
    entries: list[Mapping[str, Any]] = []
    others: list[tuple[list[str], Mapping[str, Any]]] = []
    broken = []
    folder = cache or tuning.default_cache()
    try:
        require_ours(folder)
    except FileNotFoundError:
        return Found()
    except OSError as error:
        return Found(broken=(f"what was tuned is ignored: {error}",))
    for path in sorted(folder.glob("*.json")):
        try:
            record = read(path.read_bytes())
            known = [one for one in record["entries"] if one["op"] in OPS]
            card = record["card"]
            why = differences(card, facts)
        except (OSError, UserError) as error:
            said = error.message if isinstance(error, UserError) else str(error)
            broken.append(f"{path} is ignored: {said}; `metainfer kernels tune` writes another")
            continue
        if card["device"] != facts["device"]:
            continue
        if why:
            others += [(why, one) for one in known]
        else:
            entries += known
    others.sort(key=lambda other: len(other[0]))
    return Found(tuple(entries), tuple((", ".join(why), one) for why, one in others), tuple(broken))


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process at a time adds to the files of a directory."""
    with (cache / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
