"""What a record of a commissioning says, for people: how each step ended, and what it found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from metainfer.bench import stages_report
from metainfer.bench.commission import State
from metainfer.bench.ops_report import short_case
from metainfer.bench.record import prose, table
from metainfer.core.errors import UserError
from metainfer.core.units import format_bytes, format_seconds
from metainfer.hardware.machine import Machine, Unknown
from metainfer.hardware.measured import sentences

_Record = Mapping[str, Any]
_QUIET = frozenset({State.DONE, State.LEFT_OUT})
_MOST_TOLD = 8  # of what is wrong, one by one


def report(record: _Record) -> str:
    """Steps, how each ended and why, and below them what each found."""
    steps = record["steps"]
    rows = [[one["name"], one["state"], _took(one)] for one in steps]
    lines = [
        prose(f"{record['asked']['model']}, {record['date']}, commit {record['commit'][:12]}"),
        "",
        table(["step", "", "took"], rows),
        "",
    ]
    for one in steps:
        lines += _told(one)
    text = "\n".join([*lines, f"sha256 {record['sha256']}"])
    # A stranger's record may hold what a terminal obeys.
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _took(step: _Record) -> str:
    return "" if step["state"] == State.LEFT_OUT else format_seconds(step["seconds"])


def _told(step: _Record) -> Iterator[str]:
    """What is to be said of a step, and a blank line; nothing where there is nothing."""
    found = _found(step)
    first, *more = step["why"].splitlines() or [""]
    if not first and not found:
        return
    loud = step["state"] not in _QUIET
    yield f"{step['name'].upper()} {step['state'].upper()}" if loud else step["name"]
    if first:
        yield prose(first, "  ")
    yield from (f"    {line}" for line in more)
    yield from found
    yield ""


def _found(step: _Record) -> list[str]:
    """What its record says; a signature is no proof that it says it as it should."""
    tell = _TELLERS.get(step["name"])
    if tell is None or step["record"] is None:
        return []
    try:
        return list(tell(step["record"]))
    except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
        return [prose(f"its record cannot be read: {error!r:.200}", "  ")]


def _machine(record: _Record) -> Iterator[str]:
    machine = Machine.from_json(json.dumps(record))
    gpus = () if isinstance(machine.gpus, Unknown) else machine.gpus
    names = [gpu.name for gpu in gpus]
    cards = " and ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    cpu, memory = machine.cpu, machine.memory.total_bytes
    host = "unknown CPU" if isinstance(cpu.model, Unknown) else cpu.model
    room = "" if isinstance(memory, Unknown) else f", {format_bytes(memory)} of memory"
    yield prose(f"{cards or 'no GPU'}; {host}, {cpu.physical_cores} cores{room}", "  ")


def _communication(record: _Record) -> Iterator[str]:
    """Of processes on a CPU, or of GPUs, in the record of their machine."""
    if "routes" in record:
        yield from (prose(line, "  ") for line in record["routes"])
        wrong = [point for point in record["points"] if point["wrong"]]
        yield from (f"  WRONG DATA: {one['operation']} by {one['name']}" for one in wrong)
        return
    machine = Machine.from_json(json.dumps(record))
    yield f"  {len(machine.curves)} curves and {len(machine.rates)} rates were measured"
    yield from (prose(line, "  ") for line in sentences(machine))
    yield from (prose(f"not measured {what}", "  ") for what in machine.unmeasured)


def _plan(record: _Record) -> Iterator[str]:
    chosen, told = record["chosen"], record["chosen"]["predicted"]
    first_s, next_s = told["ttft_s"], format_seconds(told["tpot_s"])
    first = "overloaded" if first_s is None else f"first token after {format_seconds(first_s)}"
    yield prose(
        f"{chosen['name']}; predicted {told['input_tokens_per_s']:,.0f} tokens/s of input, {first},"
        f" then one each {next_s}",
        "  ",
    )


def _verify(record: _Record) -> Iterator[str]:
    counts = [f"{record[name]} {name.replace('_', ' ')}" for name in
              ("passed", "failed", "not_run", "not_verified") if record[name]]  # fmt: skip
    yield f"  {', '.join(counts)}, of {len(record['cases'])} checks"
    failed = [case for case in record["cases"] if case["problem"]]
    for case in failed[:_MOST_TOLD]:
        name = f"{case['op']} {short_case(case['case'])}"
        yield prose(f"FAILED {name}, on {case['backend'] or 'nothing'}: {case['problem']}", "  ")
    yield from _rest(failed)


def _tune(record: _Record) -> Iterator[str]:
    entries = record["entries"]
    timed = sum(bool(entry["sizes"]) for entry in entries)
    yield f"  {timed} operations were timed"
    bad = [(entry, who, why) for entry in entries for who, why in entry["bad"].items()]
    for entry, who, why in bad[:_MOST_TOLD]:
        name = f"{entry['op']} {short_case(entry['case'])}"
        yield prose(f"NEVER BOUND {name}, {who}: {why}", "  ")
    yield from _rest(bad)


def _stages(record: _Record) -> Iterator[str]:
    yield from (f"  {line}" for line in stages_report.text_report(record).splitlines())


def _rest(told: list[Any]) -> Iterator[str]:
    if len(told) > _MOST_TOLD:
        yield f"  and {len(told) - _MOST_TOLD} more, in the record"


_TELLERS: Mapping[str, Callable[[_Record], Iterator[str]]] = MappingProxyType(
    {
        "probe": _machine,
        "communication": _communication,
        "plan": _plan,
        "verify": _verify,
        "tune": _tune,
        "stages": _stages,
        "ranks": _stages,
    }
)
"""By names of steps."""
