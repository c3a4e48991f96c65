"""Refusals of numbers that are out of range: each names the flag, the range and what was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from metainfer.core.errors import UserError

Given = float | Sequence[float] | None

MOST_DRAWN = 1_000_000
"""Requests, or windows of text, that are drawn before the first is used: more fill the memory."""


def require_least(name: str, given: Given, least: float) -> None:
    """Raise UserError unless each number given is at least `least`, and finite."""
    require_range(name, given, lambda number: least <= number < math.inf, f"at least {least:g}")


def require_above_zero(name: str, given: Given) -> None:
    """Raise UserError unless each number given is above 0; it may be infinite."""
    require_range(name, given, lambda number: number > 0, "above 0")


def require_drawable(name: str, given: Given) -> None:
    """Raise UserError unless so many can be drawn beforehand."""
    require_range(name, given, lambda number: number <= MOST_DRAWN, f"at most {MOST_DRAWN:,}")


def require_range(name: str, given: Given, holds: Callable[[float], bool], range_: str) -> None:
    """Raise UserError unless each number given lies in the range that `range_` describes."""
    numbers = () if given is None else given if isinstance(given, Sequence) else (given,)
    for number in numbers:
        if not holds(number):
            shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
            raise UserError(f"{name} must be {range_}, not {shown}")
