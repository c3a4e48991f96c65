"""What is made of profiles: the JSON record and a table for each step."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from metainfer.bench.ops_report import format_us, short_case
from metainfer.bench.profile import OpTime, Profile
from metainfer.bench.profile_settings import ProfileLoad
from metainfer.bench.record import prose, provenance, table
from metainfer.core.units import format_count, format_seconds
from metainfer.llm.engine import LoadedModel
from metainfer.ops.catalogue import OPS
from metainfer.ops.floor import BOUND_TOLD, Rates, operands_of

_SHOWN = 0.002
"""Operations below this share of a step are added up in the table."""


def record(
    found: Sequence[Profile], loaded: LoadedModel, load: ProfileLoad, model: str, rates: Rates
) -> dict[str, Any]:
    """The JSON record."""
    return {
        **provenance(),
        "kind": "profile",
        "machine": json.loads(loaded.machine.to_json()),
        "model": model,
        "arch": {"layers": loaded.arch.num_layers, "vocab_size": loaded.arch.vocab_size},
        "load": asdict(load),
        "plan": json.loads(loaded.plan.to_json())["values"],
        "rates": asdict(rates),
        "how": "kernels one after the other, without graphs; floors by the rates measured here",
        "steps": [_step_record(profile, rates) for profile in found],
    }


def _step_record(profile: Profile, rates: Rates) -> dict[str, Any]:
    ops = [_op_record(one, rates) for one in profile.ops]
    return {
        "phase": profile.phase,
        "rows": profile.rows,
        "tokens": profile.tokens,
        "step_s": statistics.median(profile.step_s),
        "steps_s": list(profile.step_s),
        "ops_s": sum(op["seconds"] for op in ops),
        "floor_s": sum(op["floor_s"] for op in ops),
        "ops": ops,
    }


def _op_record(one: OpTime, rates: Rates) -> dict[str, Any]:
    called = one.called
    cost, operands = OPS[called.op].cost(called.case, one.load), operands_of(called.case)
    floor_s = one.calls * max(rates.floor_s(cost, operands), rates.launch_s)
    return {
        "op": called.op,
        "case": asdict(called.case),
        "backend": called.backend,
        "rows": one.load.rows,
        "calls": one.calls,
        "seconds": one.median_s,
        "low_s": min(one.seconds),
        "high_s": max(one.seconds),
        "floor_s": floor_s,
        "bound": rates.bound(cost, operands),
    }


def text_report(made: Mapping[str, Any]) -> str:
    lines = [prose(f"{made['model']}: {made['arch']['layers']} layers; {made['how']}")]
    for step in made["steps"]:
        lines += ["", f"{title_of(step)}; times in us", _table(step)]
        outside_s = step["step_s"] - step["ops_s"]
        summed = (
            f"operations {format_seconds(step['ops_s'])}, their floors"
            f" {format_seconds(step['floor_s'])}; the step as the host sees it"
            f" {format_seconds(step['step_s'])}"
            + (f", {format_seconds(outside_s)} of it between them" if outside_s > 0 else "")
        )
        lines.append(prose(summed))
    return "\n".join(lines)


def title_of(step: Mapping[str, Any]) -> str:
    rows, tokens = format_count(step["rows"]), format_count(step["tokens"])
    return f"{step['phase']}, {rows} rows, {tokens} tokens"


def label_of(op: Mapping[str, Any]) -> str:
    """An operation and what tells its case from others."""
    return f"{op['op']} {short_case(op['case'])}"


def _table(step: Mapping[str, Any]) -> str:
    header = ["operation", "rows", "calls", "time", "share", "floor", "of floor", "by", "runs on"]
    whole_s = max(step["ops_s"], 1e-12)
    shown = [op for op in step["ops"] if op["seconds"] >= _SHOWN * whole_s]
    rows = [
        [
            label_of(op),
            f"{op['rows']:,}",
            str(op["calls"]),
            format_us(op["seconds"]),
            f"{op['seconds'] / whole_s:.1%}",
            format_us(op["floor_s"]),
            f"{op['floor_s'] / max(op['seconds'], 1e-12):.0%}",
            BOUND_TOLD[op["bound"]],
            op["backend"],
        ]
        for op in shown
    ]
    if len(shown) < len(step["ops"]):
        rest = step["ops"][len(shown) :]
        seconds, floor_s = (sum(op[key] for op in rest) for key in ("seconds", "floor_s"))
        calls = sum(op["calls"] for op in rest)
        share = f"{seconds / whole_s:.1%}"
        cells = [f"{len(rest)} others", "", str(calls), format_us(seconds), share]
        rows.append([*cells, format_us(floor_s), "", "", ""])
    return table(header, rows)
