"""What pairs of measurements say: mean effect, its confidence interval, the paired tests.

Student's t from the standard library alone; Wilcoxon's test where scipy is installed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

_STEPS = 300


@dataclass(frozen=True, slots=True)
class PairedEffect:
    """How much faster B is than A: B's rate over A's, minus 1.

    Mean and interval are those of the logarithms of the ratios, taken back: a mean of ratios is
    above 1 by about the noise squared where both are equally fast, whichever is called B.

    Attributes:
        pairs: how many.
        mean, low, high: of the effect (geometric), and its 95 % confidence interval.
        t, p_t: of the paired t-test against no effect, two-sided.
        p_wilcoxon: of the signed-rank test; None without scipy.
        median: of the effect.
        wins: pairs in which B was faster.
    """

    pairs: int
    mean: float
    low: float
    high: float
    median: float
    t: float
    p_t: float
    p_wilcoxon: float | None
    wins: int


def paired_effect(rates_a: Sequence[float], rates_b: Sequence[float]) -> PairedEffect:
    """Of at least two pairs of positive rates."""
    effects = [math.log(b / a) for a, b in zip(rates_a, rates_b, strict=True)]
    count = len(effects)
    mean, error = statistics.fmean(effects), statistics.stdev(effects) / math.sqrt(count)
    half = t_quantile(0.975, count - 1) * error
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    return PairedEffect(
        pairs=count,
        mean=math.expm1(mean),
        low=math.expm1(mean - half),
        high=math.expm1(mean + half),
        median=math.expm1(statistics.median(effects)),
        t=t,
        p_t=2.0 * _upper_tail(abs(t), count - 1),
        p_wilcoxon=_wilcoxon(effects),
        wins=sum(effect > 0 for effect in effects),
    )


def t_probability(t: float, freedom: int) -> float:
    """P(T <= t) of Student's t with so many degrees of freedom."""
    return 1.0 - _upper_tail(t, freedom) if t >= 0 else _upper_tail(-t, freedom)


def _upper_tail(t: float, freedom: int) -> float:
    """P(T > t) for t >= 0, small ones too."""
    if math.isinf(t):
        return 0.0
    return 0.5 * incomplete_beta(freedom / (freedom + t * t), freedom / 2.0, 0.5)


def t_quantile(probability: float, freedom: int) -> float:
    """The t with P(T <= t) = `probability`, from 0.5 up."""
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < probability:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        if t_probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), regularised, by its continued fraction."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1.0) / (a + b + 2.0):  # where the fraction would converge slowly
        return 1.0 - incomplete_beta(1.0 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _beta_fraction(x, a, b))


def _beta_fraction(x: float, a: float, b: float) -> float:
    """1 + d1 / (1 + d2 / (1 + ...)), from the inside out."""
    value = 1.0
    for n in range(_STEPS, 0, -1):
        m = n // 2
        if n % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1.0 + term / value
    return value


def _wilcoxon(effects: Sequence[float]) -> float | None:
    if find_spec("scipy") is None or not any(effects):
        return None
    return float(import_module("scipy.stats").wilcoxon(effects).pvalue)
