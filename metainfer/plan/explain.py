"""Explain: the plan as a table for people: value, origin, reason."""

from __future__ import annotations

import textwrap
from itertools import zip_longest
from typing import Any

from metainfer.core.units import format_bytes, format_count
from metainfer.plan.plan import Plan

_WIDTH = 100
_MOST_VALUE = 24  # columns; lists of values take several lines


def explain(plan: Plan) -> str:
    """Aligned lines, each value with its reason wrapped, and the sum of the memory ledger."""
    rows = [("plan", "value", "origin", "reason")]
    rows += [
        (name, _shown(name, value.value), str(value.origin), value.reason)
        for name, value in plan.items()
    ]
    total = sum(value.value for name, value in plan.items() if name.endswith("_bytes"))
    rows.append(("memory in all", format_bytes(total), "", ""))
    cells = [[[row[0]], _wrapped(row[1], _MOST_VALUE), [row[2]]] for row in rows]
    widths = [max(len(line) for row in cells for line in row[n]) + 2 for n in range(3)]
    lines = []
    for row, first in zip(rows, cells, strict=True):
        columns = [*first, _wrapped(row[3], _WIDTH - sum(widths))]
        for parts in zip_longest(*columns, fillvalue=""):
            head = "".join(part.ljust(width) for part, width in zip(parts, widths, strict=False))
            lines.append((head + parts[3]).rstrip())
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False) or [""]


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
