"""Explain: the plan as a table for people: value, origin, reason."""

from __future__ import annotations

import textwrap
from typing import Any

from metainfer.core.units import format_bytes, format_count
from metainfer.plan.plan import Plan

_WIDTH = 100
_LEAST_REASON = 40  # columns, however long the values are


def explain(plan: Plan) -> str:
    """Aligned lines, each value with its reason wrapped, and the sum of the memory ledger."""
    rows = [("plan", "value", "origin", "reason")]
    rows += [
        (name, _shown(name, value.value), str(value.origin), value.reason)
        for name, value in plan.items()
    ]
    total = sum(value.value for name, value in plan.items() if name.endswith("_bytes"))
    rows.append(("memory in all", format_bytes(total), "", ""))
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    lines = []
    for row in rows:
        head = "".join(cell.ljust(widths[n] + 2) for n, cell in enumerate(row[:3]))
        room = max(_LEAST_REASON, _WIDTH - len(head))
        first, *rest = textwrap.wrap(row[3], room, break_on_hyphens=False) or [""]
        lines += [(head + first).rstrip(), *(" " * len(head) + more for more in rest)]
    return "\n".join(lines)


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
