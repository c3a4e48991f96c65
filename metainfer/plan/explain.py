"""Explain: the plan as a table for people: value, origin, reason."""

from __future__ import annotations

from typing import Any

from metainfer.core.units import format_bytes, format_count
from metainfer.plan.plan import Plan


def explain(plan: Plan) -> str:
    """Aligned lines, one per value, and the sum of the memory ledger."""
    rows = [("plan", "value", "origin", "reason")]
    rows += [
        (name, _shown(name, value.value), str(value.origin), value.reason)
        for name, value in plan.items()
    ]
    total = sum(value.value for name, value in plan.items() if name.endswith("_bytes"))
    rows.append(("memory in all", format_bytes(total), "", ""))
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(widths[n]) for n, cell in enumerate(row[:3])), row[3]]).rstrip()
        for row in rows
    )


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return format_count(value)
    return value or "default"
