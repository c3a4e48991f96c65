"""What is made of the turns of `bench stages`: the JSON record and a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from metainfer.arch.record import Arch
from metainfer.bench.model import Work
from metainfer.bench.record import provenance, table
from metainfer.bench.serve_report import percentile
from metainfer.bench.stage import STAGES
from metainfer.bench.stages import DECODE, PREFILL, TRAFFIC, SideRun, StagesRun, works_of
from metainfer.bench.stages_settings import TOGETHER, StagesLoad
from metainfer.core.units import format_bytes, format_count, format_seconds

_ENERGY_S = 1.0
"""Work that took less in all turns says nothing of energy: counters move in steps."""

_MOST_WRONG = 8  # that are told one by one

_COUNTED = (
    "prompts are token ids drawn at random, new for every turn, and counted as they are sent;"
    " output tokens are those of the engine's events; cached tokens are those of its usage"
)


def record(
    run: StagesRun, load: StagesLoad, model: str, arch: Arch, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON record."""
    works = works_of(load)
    made: dict[str, Any] = {
        **provenance(),
        "kind": "stages",
        "machine": dict(machine),
        "model": model,
        "arch": {
            "layers": arch.num_layers,
            "kinds": [str(layer.kind) for layer in arch.layers],
            "vocab_size": arch.vocab_size,
        },
        "load": asdict(load),
        "engines": run.engines,
        "order": "alternating every round",
        "rounds": run.rounds,
        "pattern": load.pattern.to_json() if load.requests else None,
        "counted": _COUNTED,
        "sides": {name: side_record(side) for name, side in run.sides.items()},
        "works": [
            {
                **asdict(work),
                "sides": {
                    name: work_record(work, side.turns[work.name])
                    for name, side in run.sides.items()
                    if side.turns.get(work.name)
                },
            }
            for work in works
        ],
    }
    made["not_cold"] = [
        {"side": side, "work": work, "cached_tokens": tokens}
        for side, work, tokens in _not_cold(made)
    ]
    return made


def side_record(side: SideRun) -> dict[str, Any]:
    """Receipt of one side."""
    turns = [said for of_work in side.turns.values() for said in of_work]
    return {
        "receipt": side.ready,
        "peaks": side.peaks,
        "tokens": side.counted,
        "kernels_compiled": side.kernels_compiled,
        "clocks": _clocks(turns),
        "missing": side.missing,
    }


def work_record(work: Work, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What one side did at one piece of work."""
    if work.do == TRAFFIC:
        return _traffic_record(turns)
    seconds = [said["seconds"] for said in turns]
    tokens = [said["tokens"] for said in turns]
    rates = [n / max(s, 1e-9) for n, s in zip(tokens, seconds, strict=True)]
    made: dict[str, Any] = {
        "seconds": seconds,
        "tokens": tokens,
        "cached_tokens": sum(said["cached_tokens"] for said in turns),
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_low": min(rates),
        "tokens_per_s_high": max(rates),
        "tokens_per_joule": _per_joule(sum(tokens), sum(seconds), turns),
    }
    if work.do == PREFILL:
        made |= {"ttft_s_p50": percentile(seconds, 50), "ttft_s_p95": percentile(seconds, 95)}
    if work.do == DECODE:
        steps = [s * work.batch / max(n, 1) for n, s in zip(tokens, seconds, strict=True)]
        made["tpot_s"] = statistics.median(steps)
    return made


def _traffic_record(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    served = [one for said in turns for one in said["served"]]
    seconds = sum(max(one["ended_s"] for one in said["served"]) for said in turns)
    tpots = [one["tpot_s"] for one in served if one["tpot_s"] is not None]
    ttfts = [one["ttft_s"] for one in served]
    num_input, num_output = (
        sum(one[name] for one in served) for name in ("prompt_tokens", "output_tokens")
    )
    return {
        "requests": len(served),
        "seconds": seconds,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "cached_tokens": sum(one["cached_tokens"] for one in served),
        "ttft_s": ttfts,
        "ttft_s_p50": percentile(ttfts, 50),
        "ttft_s_p95": percentile(ttfts, 95),
        "tpot_s_p50": percentile(tpots, 50) if tpots else None,
        "tpot_s_p95": percentile(tpots, 95) if tpots else None,
        "tokens_per_joule": _per_joule(num_input + num_output, seconds, turns),
    }


def _per_joule(tokens: int, seconds: float, turns: Sequence[Mapping[str, Any]]) -> float | None:
    if seconds < _ENERGY_S or not all("joules" in said for said in turns):
        return None
    return tokens / max(sum(said["joules"] for said in turns), 1e-9)


def _clocks(turns: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Least and most MHz at the end of the turns."""
    seen: dict[str, list[int]] = {}
    for said in turns:
        for name, value in said.get("clocks", {}).items():
            seen.setdefault(name, []).append(value)
    return {name: [min(values), max(values)] for name, values in seen.items()}


def text_report(made: Mapping[str, Any]) -> str:
    """The record as a table: a column for each setting, and how many times as fast the last is as
    the first."""
    sides = list(made["sides"])
    compared = len(sides) > 1
    header = ["", *sides, *([f"{sides[-1]} over {sides[0]}"] if compared else [])]
    rows = [
        [label, *(_cell(kind, values.get(name)) for name in sides), _faster(kind, values, sides)]
        for label, kind, values in _lines(made)
    ]
    lines = [table(header, rows if compared else [row[: len(header)] for row in rows]), ""]
    lines += _remarks(made)
    return "\n".join(lines)


def _lines(made: Mapping[str, Any]) -> Iterable[tuple[str, str, dict[str, float | None]]]:
    """(label, kind of number, value by side)."""
    for work in made["works"]:

        def of(key: str, work: Mapping[str, Any] = work) -> dict[str, float | None]:
            return {name: side.get(key) for name, side in work["sides"].items()}

        if work["do"] == PREFILL:
            length = format_count(work["prompt_tokens"])
            yield f"input {length}, tok/s", "rate", of("tokens_per_s")
            yield "  TTFT p50", "time", of("ttft_s_p50")
            yield "  TTFT p95", "time", of("ttft_s_p95")
        elif work["do"] == DECODE:
            yield f"TPOT, batch {work['batch']}", "time", of("tpot_s")
        else:
            yield "traffic, TTFT p50", "time", of("ttft_s_p50")
            yield "  TTFT p95", "time", of("ttft_s_p95")
            yield "  TPOT p50", "time", of("tpot_s_p50")
        if any(of("tokens_per_joule").values()):
            yield "  tok/J", "rate", of("tokens_per_joule")
    sides = made["sides"].items()
    for label, name in (("peak, GPU", "device_peak_bytes"), ("peak, host", "peak_bytes")):
        if any(side["peaks"].get(name) for _, side in sides):
            yield label, "bytes", {key: side["peaks"].get(name) for key, side in sides}
    longest = {key: side["receipt"].get("longest_context") for key, side in sides}
    yield "longest context", "count", longest


def _remarks(made: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{made['model']}: {made['arch']['layers']} layers, vocabulary"
        f" {made['arch']['vocab_size']:,}; {made['rounds']} rounds,"
        + (
            " engines beside each other"
            if made["engines"] == TOGETHER
            else " each turn of a setting in a process of its own"
        )
    ]
    for name, side in made["sides"].items():
        cached, prompts = (side["tokens"].get(k, 0) for k in ("cached_tokens", "prompt_tokens"))
        says = STAGES.get(name, "")
        replaced = side["receipt"].get("open")
        if replaced:
            says += ": " + ", ".join(f"{op} by {project}" for op, project in replaced.items())
        lines.append(f"{name}: {cached} of {prompts:,} prompt tokens cached; {says}".rstrip("; "))
        compiled = side.get("kernels_compiled", 0)
        if compiled:
            lines.append(f"{name}: {compiled} kernels were compiled while requests waited")
        lines += [f"{name}, {work}: {why}" for work, why in side["missing"].items()]
        lines += _positions(name, side["receipt"].get("positions"))
    lines += not_cold_lines(made)
    pattern = made["pattern"]
    if pattern:
        lines.append(
            f"traffic: {pattern['requests']} requests, Poisson at {pattern['rate_per_s']:g}/s,"
            f" {pattern['shortest']} to {pattern['longest']} tokens log-uniform,"
            f" {pattern['multi_turn']:.0%} later turns, {pattern['answer']} tokens of answer"
        )
    return lines


def _positions(name: str, checked: Mapping[str, Any] | None) -> list[str]:
    """What was found where positions were held against the references."""
    if not checked:
        return []
    wrong = checked["wrong"]
    lines = [
        f"{name}: {len(checked['positions'])} positions of {checked['tokens']:,} tokens held"
        f" against the references in {format_seconds(checked['seconds'])}:"
        f" {checked['checks'] - len(wrong)} of {checked['checks']} results agree; largest errors: "
        + ", ".join(f"{op} {of['error']:.1e}" for op, of in checked["ops"].items())
    ]
    lines += [
        f"WRONG: {one['op']} in layer {one['layer']} at position {one['position']:,}:"
        f" {one['problem']}"
        for one in wrong[:_MOST_WRONG]
    ]
    return lines


def wrong_positions(made: Mapping[str, Any]) -> int:
    """Results of all sides that the references do not confirm."""
    receipts = (side["receipt"] for side in made["sides"].values())
    return sum(len((receipt.get("positions") or {"wrong": ()})["wrong"]) for receipt in receipts)


def not_cold_lines(made: Mapping[str, Any]) -> list[str]:
    """Sentences that name work whose rate is none of prefill."""
    return [
        f"NOT COLD: {one['side']}, {one['work']}: {one['cached_tokens']:,} prompt tokens came from"
        " a cache"
        for one in made.get("not_cold", ())
    ]


def _not_cold(made: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """(side, work, cached tokens) of work whose prompts are new and were not all computed. Traffic
    with later turns has tokens that are cached."""
    later_turns = (made["pattern"] or {"multi_turn": 0.0})["multi_turn"] > 0
    return [
        (name, work["name"], side["cached_tokens"])
        for work in made["works"]
        for name, side in work["sides"].items()
        if side["cached_tokens"] and not (work["do"] == TRAFFIC and later_turns)
    ]


def _cell(kind: str, value: float | None) -> str:
    if value is None:
        return "-"
    match kind:
        case "time":
            return format_seconds(value)
        case "bytes":
            return format_bytes(int(value))
        case "count":
            return format_count(int(value))
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _faster(kind: str, values: Mapping[str, float | None], sides: Sequence[str]) -> str:
    first, last = values.get(sides[0]), values.get(sides[-1])
    if not first or not last or kind not in ("rate", "time"):
        return ""
    return f"{last / first if kind == 'rate' else first / last:.2f} x"
