"""How many experts a step touches, and how unevenly ranks that deal them out are loaded."""

from __future__ import annotations

import math
from functools import cache


def touched(experts: int, selected: int, rows: float, parts: int = 1) -> float:
    """Distinct experts whose weights one of `parts` ranks reads, on the busiest of them.

    Rows choose alike and independently: one of E experts stays untouched by all rows with
    probability (1 - K / E)^rows. The busiest of several parts has as many more than the mean as
    the largest of so many draws lies above theirs.
    """
    if not experts:
        return 0.0
    free = math.pow(1.0 - selected / experts, rows)
    hit = 1.0 - free
    held = experts / parts
    mean = held * hit
    spread = math.sqrt(held * hit * free)
    return min(held, mean + largest_of(parts) * spread)


@cache
def largest_of(draws: int) -> float:
    """How far the largest of so many draws of a normal distribution lies above its mean, in
    standard deviations (exact for 1 and 2, within 2 % for up to 16)."""
    if draws < 2:
        return 0.0
    if draws == 2:
        return 1.0 / math.sqrt(math.pi)
    # Blom's approximation of the expected largest order statistic.
    return _quantile((draws - 0.375) / (draws + 0.25))


def _quantile(share: float) -> float:
    low, high = 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        if 0.5 * (1.0 + math.erf(middle / math.sqrt(2.0))) < share:
            low = middle
        else:
            high = middle
    return low


def skew(experts: int, parts: int, variation: float) -> float:
    """Rows of the busiest of `parts` ranks over the mean, where the popularity of experts has
    this coefficient of variation: a rank's is that of the mean of its experts."""
    if parts < 2:
        return 1.0
    return 1.0 + largest_of(parts) * variation / math.sqrt(experts / parts)
