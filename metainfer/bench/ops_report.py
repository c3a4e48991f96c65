"""What is made of the turns of `bench ops`: the JSON record and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from metainfer.bench.cards import CARDS, projected_s
from metainfer.bench.ops import OpResult, floors
from metainfer.bench.ops_settings import OpsLoad
from metainfer.bench.record import provenance, table
from metainfer.core.units import format_seconds
from metainfer.ops.floor import Rates, operands_of

GENERIC = "torch"
"""Name of the side that composes an operation of torch's own."""


def record(
    results: Sequence[OpResult],
    load: OpsLoad,
    rates: Rates,
    portable: tuple[str, Rates] | None,
    machine: Mapping[str, Any],
    peers: Mapping[str, str],
) -> dict[str, Any]:
    """The JSON record.

    Args:
        portable: the side that ran the code of an older GPU, and the rates of its instructions.
        peers: name -> why a peer is not there.
    """
    return {
        **provenance(),
        "machine": dict(machine),
        "load": asdict(load),
        "rates": asdict(rates),
        "portable": None if portable is None else {"side": portable[0], **asdict(portable[1])},
        "peers_missing": dict(peers),
        "cards": [{"name": c.name, "rates": _plain(c.rates()), "source": c.source} for c in CARDS],
        "operations": [_entry(result, rates, portable) for result in results],
    }


def _entry(result: OpResult, rates: Rates, portable: tuple[str, Rates] | None) -> dict[str, Any]:
    work, cost = result.work, result.cost
    floor_s, bound = floors(result, rates)
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
        "uses": work.uses,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "floor_s": floor_s,
        "bound": bound,
        "sides": sides,
        "missing": result.missing,
    }
    if portable is not None and portable[0] in sides:
        operands = operands_of(work.case)
        here_s = portable[1].floor_s(cost, operands)
        fraction = here_s / sides[portable[0]]["median_s"]
        entry["portable_of_floor"] = fraction
        entry["projected_s"] = {
            card.name: projected_s(card, cost, operands, fraction) for card in CARDS
        }
    return entry


def _plain(rates: Rates) -> dict[str, Any]:
    return {"bytes_per_s": rates.bytes_per_s, "flops_per_s": dict(rates.flops_per_s)}


def text_report(made: Mapping[str, Any]) -> str:
    """The record as one table per model and number of ranks."""
    lines = [_rates_line(made["rates"])]
    if made["portable"]:
        lines.append(f"{made['portable']['side']}: {_rates_line(made['portable'])}")
    lines += [f"{name}: {why}" for name, why in made["peers_missing"].items()]
    for model, ranks in dict.fromkeys(
        (entry["model"], entry["tensor_parallel_size"]) for entry in made["operations"]
    ):
        entries = [
            entry
            for entry in made["operations"]
            if (entry["model"], entry["tensor_parallel_size"]) == (model, ranks)
        ]
        lines += ["", f"{model}, one rank of {ranks}", _table(entries)]
    return "\n".join(lines)


def _table(entries: Sequence[Mapping[str, Any]]) -> str:
    sides = list(dict.fromkeys(name for entry in entries for name in entry["sides"]))
    cards = [card.name for card in CARDS if any("projected_s" in entry for entry in entries)]
    header = ["operation", "rows", "floor", "by"]
    for name in sides:
        header += [name, "of floor"]
    header += ["TFLOP/s", "TB/s", *cards]
    rows = []
    for entry in entries:
        row = [_title(entry), f"{entry['rows']:,}", format_us(entry["floor_s"]), entry["bound"][:5]]
        for name in sides:
            side = entry["sides"].get(name)
            row += [format_us(side["median_s"]), f"{side['of_floor']:.0%}"] if side else ["-", ""]
        best = next(iter(entry["sides"].values()), None)
        row += (
            [f"{best['flops_per_s'] / 1e12:.3g}", f"{best['bytes_per_s'] / 1e12:.3g}"]
            if best
            else ["", ""]
        )
        row += [
            format_us(entry["projected_s"][card]) if "projected_s" in entry else ""
            for card in cards
        ]
        rows.append(row)
    lines = [table(header, rows)]
    for entry in entries:
        lines += [f"  {_title(entry)}, {name}: {why}" for name, why in entry["missing"].items()]
    return "\n".join(lines)


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
        f"measured first: copy {rates['bytes_per_s'] / 1e12:.3g} TB/s; products {flops} TFLOP/s;"
        f" launch {format_seconds(rates['launch_s'])}; times in us"
    )
