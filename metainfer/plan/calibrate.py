"""Calibration: the few constants that published figures set, within what is physical.

Around the constants as they ship the logarithm of a prediction is nearly a straight line over the
logarithm of each constant. What is made small is the sum of squares of logarithms of predicted over
published, and of how far constants are from what they would be without any figure. Each constant in
turn is moved to its best place until none moves: with bounds, too, that ends at the one minimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from metainfer.plan.cost.constants import Calibrated

Path = tuple[str, ...]

_SPREAD = 0.15
"""Of the logarithm of one figure: sites differ by so much in one setting."""
_FREEDOM = 0.35
"""Of the logarithm of a constant about its start, which measurements of single operations give:
those of one kind differ by a factor of 1.4 either way."""
_FAR = 0.4
"""Residuals beyond count by their size and not by its square: a setting was taken for another."""
_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Attributes:
    residuals: of each row, the logarithm of predicted over published.
    slopes: of each constant, by how much each residual grows with its logarithm.
    """

    residuals: Sequence[float]
    slopes: Mapping[Path, Sequence[float]]


def fitted(
    found: Sensitivity,
    calibrated: Sequence[Calibrated],
    shipped: Mapping[Path, float],
    kept: Iterable[int],
) -> dict[Path, float]:
    """Constants that the rows of the places `kept` set."""
    rows = list(kept)
    moves = dict.fromkeys((one.path for one in calibrated), 0.0)
    left = {n: found.residuals[n] for n in rows}
    for _ in range(_ROUNDS):
        largest = 0.0
        for one in calibrated:
            slopes, base = found.slopes[one.path], shipped[one.path]
            weights = {n: _weight(left[n]) for n in rows if slopes[n]}
            # Of the move of this constant alone, from where it is.
            pull = 1.0 / _FREEDOM**2
            distance = math.log(one.start / base) - moves[one.path]
            down = sum(w * slopes[n] * left[n] for n, w in weights.items()) - pull * distance
            curve = sum(w * slopes[n] ** 2 for n, w in weights.items()) + pull
            low, high = math.log(one.low / base), math.log(one.high / base)
            place = min(high, max(low, moves[one.path] - down / curve))
            step = place - moves[one.path]
            moves[one.path] = place
            for n in weights:
                left[n] += slopes[n] * step
            largest = max(largest, abs(step))
        if largest < 1e-6:
            break
    return {path: shipped[path] * math.exp(move) for path, move in moves.items()}


def _weight(residual: float) -> float:
    return min(1.0, _FAR / max(abs(residual), 1e-9)) / _SPREAD**2
