"""What is made of the turns of `bench ops`: the JSON record and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from metainfer.bench.cards import CARDS, projected_s
from metainfer.bench.ops import OpResult, floors
from metainfer.bench.ops_settings import OpsLoad
from metainfer.bench.record import prose, provenance, table
from metainfer.core.units import format_seconds
from metainfer.ops.floor import BOUND_TOLD, Rates, operands_of

GENERIC = "torch"
"""Name of the side that composes an operation of torch's own."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found out before the operations.

    Attributes:
        rates: of the device.
        code_for: the older GPU whose code ran beside, and the side's name; None for none.
        portable: the rates of that code's instructions here.
        missing: name of a peer -> why it is not there.
    """

    rates: Rates
    code_for: str | None
    portable: Rates | None
    missing: Mapping[str, str]


def record(
    results: Sequence[OpResult],
    load: OpsLoad,
    facts: Measured | None,
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON record. `facts`: None where the time did not reach them."""
    return {
        **provenance(),
        "machine": dict(machine),
        "load": asdict(load),
        "rates": None if facts is None else asdict(facts.rates),
        "portable": None
        if facts is None or facts.portable is None
        else {"side": facts.code_for, **asdict(facts.portable)},
        "peers_missing": {} if facts is None else dict(facts.missing),
        "cards": [{"name": c.name, "rates": _plain(c.rates()), "source": c.source} for c in CARDS],
        "operations": [] if facts is None else [_entry(result, facts) for result in results],
    }


def _entry(result: OpResult, facts: Measured) -> dict[str, Any]:
    work, cost = result.work, result.cost
    floor_s, bound = floors(result, facts.rates)
    sides: dict[str, Any] = {}
    for name, seconds in result.seconds.items():
        middle = statistics.median(seconds)
        sides[name] = {
            "seconds": seconds,
            "median_s": middle,
            "low_s": min(seconds),
            "high_s": max(seconds),
            "flops_per_s": cost.flops / middle,
            "bytes_per_s": cost.bytes / middle,
            "of_floor": floor_s / middle,
            "difference": result.errors.get(name),
        }
    entry: dict[str, Any] = {
        "model": work.model,
        "tensor_parallel_size": work.ranks,
        "op": work.op,
        "case": asdict(work.case),
        "phase": work.phase,
        "rows": work.load.rows,
        "tokens": work.load.tokens,
        "times": work.times,
        "served": work.served,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "floor_s": floor_s,
        "bound": bound,
        "sides": sides,
        "missing": result.missing,
    }
    if facts.portable is not None and facts.code_for in sides:
        operands = operands_of(work.case)
        here_s = facts.portable.floor_s(cost, operands)
        fraction = here_s / sides[facts.code_for]["median_s"]
        entry["portable_of_floor"] = fraction
        entry["projected_s"] = {
            card.name: projected_s(card, cost, operands, fraction) for card in CARDS
        }
    return entry


def _plain(rates: Rates) -> dict[str, Any]:
    return {"bytes_per_s": rates.bytes_per_s, "flops_per_s": dict(rates.flops_per_s)}


def text_report(made: Mapping[str, Any]) -> str:
    """The record as one table per model and number of ranks."""
    if made["rates"] is None:
        return "the time did not reach the first operation"
    lines = [prose(f"measured first, here: {_rates_line(made['rates'])}")]
    portable = made["portable"]
    if portable:
        lines.append(prose(f"as {portable['side']}: {_rates_line(portable)}"))
    lines += [prose(f"{name}: {why}") for name, why in made["peers_missing"].items()]
    for model, ranks in dict.fromkeys(
        (entry["model"], entry["tensor_parallel_size"]) for entry in made["operations"]
    ):
        entries = [
            entry
            for entry in made["operations"]
            if (entry["model"], entry["tensor_parallel_size"]) == (model, ranks)
        ]
        lines += ["", f"{model}, one rank of {ranks}; times in us"]
        lines.append(_table(entries, portable["side"] if portable else None))
        lines += _passes(entries)
    return "\n".join(lines)


def _table(entries: Sequence[Mapping[str, Any]], code_for: str | None) -> str:
    """Code of an older GPU, and cards that run it, in a table of their own."""
    header = ["operation", "rows", "floor", "by", "ours", "of floor", "runs on", "TFLOP/s", "TB/s"]
    header += ["torch"]
    lines = [table(header, [_row(entry, header, code_for) for entry in entries])]
    if code_for:
        header = ["operation", "rows", "floor", code_for, "of its floor"]
        header += [card.name for card in CARDS]
        lines += ["", table(header, [_row(entry, header, code_for) for entry in entries])]
    for entry in entries:
        if others := _others(entry, code_for):
            lines.append(prose(f"{_title(entry)}, {entry['rows']:,} rows: {others}", "  "))
        lines += [
            prose(f"{_title(entry)}, {name}: {why}", "  ") for name, why in entry["missing"].items()
        ]
    return "\n".join(lines)


def _passes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a pass through the model spends in operations that its layers run, by phase and rows."""
    lines = []
    served = [entry for entry in entries if entry["served"] and entry["sides"]]
    for phase, rows in dict.fromkeys((entry["phase"], entry["rows"]) for entry in served):
        floor_s = ours_s = 0.0
        for entry in served:
            if (entry["phase"], entry["rows"]) == (phase, rows):
                floor_s += entry["times"] * entry["floor_s"]
                ours_s += entry["times"] * next(iter(entry["sides"].values()))["median_s"]
        spent = (
            f"a pass of {phase}, {rows:,} rows, spends {format_seconds(ours_s)} in what its layers"
            f" run of these; their floors are {format_seconds(floor_s)}"
        )
        lines.append(prose(spent))
    return lines


def _ours(entry: Mapping[str, Any], code_for: str | None) -> str | None:
    return next((name for name in entry["sides"] if name not in (code_for, GENERIC)), None)


def _others(entry: Mapping[str, Any], code_for: str | None) -> str:
    """Sides that have no column."""
    told = (_ours(entry, code_for), code_for, GENERIC)
    return ", ".join(
        f"{name} {format_us(side['median_s'])}"
        for name, side in entry["sides"].items()
        if name not in told
    )


def _row(entry: Mapping[str, Any], header: Sequence[str], code_for: str | None) -> list[str]:
    sides = entry["sides"]
    ours = _ours(entry, code_for)
    cells = dict.fromkeys(header, "")
    cells |= {
        "operation": _title(entry),
        "rows": f"{entry['rows']:,}",
        "floor": format_us(entry["floor_s"]),
        "by": BOUND_TOLD[entry["bound"]],
    }
    if ours is not None:
        side = sides[ours]
        cells |= {
            "ours": format_us(side["median_s"]),
            "of floor": f"{side['of_floor']:.0%}",
            "runs on": ours,
            "TFLOP/s": _tera(side["flops_per_s"]),
            "TB/s": _tera(side["bytes_per_s"]),
        }
    if GENERIC in sides:
        cells["torch"] = format_us(sides[GENERIC]["median_s"])
    if code_for in sides:
        cells[str(code_for)] = format_us(sides[code_for]["median_s"])
        cells["of its floor"] = f"{entry['portable_of_floor']:.0%}"
        cells |= {name: format_us(seconds) for name, seconds in entry["projected_s"].items()}
    return [cells[name] for name in header]


def _tera(per_s: float) -> str:
    return "<0.001" if 0 < per_s < 1e9 else f"{per_s / 1e12:.3g}"


def format_us(seconds: float) -> str:
    """Microseconds with three figures."""
    micro = seconds * 1e6
    return f"{micro:.3g}" if micro < 100 else f"{micro:,.0f}"


def _title(entry: Mapping[str, Any]) -> str:
    return f"{entry['op']} {short_case(entry['case'])}"


def short_case(case: Mapping[str, Any]) -> str:
    """The facts of a case that tell it from others, in a few characters."""
    skipped = {"eps", "norm_eps", "iterations", "limit", "scale", "dtype", "stream_dtype", "block"}
    told = []
    for name, value in case.items():
        if name in skipped or value in (None, "", 0, False, "dense"):
            continue
        told.append(
            name if value is True else f"{name[0]}{value}" if isinstance(value, int) else str(value)
        )
    return " ".join(told)


def _rates_line(rates: Mapping[str, Any]) -> str:
    flops = ", ".join(f"{k} {v / 1e12:.3g}" for k, v in rates["flops_per_s"].items())
    return (
        f"copy {rates['bytes_per_s'] / 1e12:.3g} TB/s; products {flops} TFLOP/s;"
        f" launch {format_seconds(rates['launch_s'])}"
    )
