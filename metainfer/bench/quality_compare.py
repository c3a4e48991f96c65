"""How far one setting's predictions are from another's, and whether that passes. No torch.

The engine tells the log-probability of each token and of the 20 likeliest ones. The divergence is
taken over the tokens that both sides tell, each for itself, and all others together: that is a
lower bound of the true one, and next to it where the told tokens hold most of the probability.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Of the mass that is not told, what fp32 log-probabilities cannot tell from nothing.
_NOTHING = 1e-6

Position = Sequence[Any]  # (log-probability of the token, [[token id, log-probability], ...])


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of B from A, over all predicted tokens.

    Attributes:
        kl, kl_p99, kl_most: nats per token: mean, 99th percentile, largest.
        told: mean share of A's probability on tokens that both tell.
        top1: share of tokens where both have the same likeliest one.
        perplexity_a, perplexity_b: of the windows' own tokens.
    """

    tokens: int
    kl: float
    kl_p99: float
    kl_most: float
    told: float
    top1: float
    perplexity_a: float
    perplexity_b: float

    @property
    def perplexity_rise(self) -> float:
        return self.perplexity_b / self.perplexity_a - 1.0


def divergence(
    a: Sequence[Sequence[Position]],
    b: Sequence[Sequence[Position]],
    windows: Sequence[Sequence[int]],
) -> Divergence:
    """Of the predictions of both sides for `windows`, of which the first token has none."""
    each, told, equal, nats_a, nats_b = [], [], 0, 0.0, 0.0
    for of_a, of_b, ids in zip(a, b, windows, strict=True):
        for (own_a, top_a), (own_b, top_b), token in zip(of_a, of_b, ids[1:], strict=True):
            known_a, known_b = {token: own_a, **dict(top_a)}, {token: own_b, **dict(top_b)}
            kl, share = _kl(known_a, known_b)
            each.append(kl)
            told.append(share)
            equal += top_a[0][0] == top_b[0][0]
            nats_a -= own_a
            nats_b -= own_b
    count = len(each)
    ordered = sorted(each)
    return Divergence(
        tokens=count,
        kl=statistics.fmean(each),
        kl_p99=ordered[math.ceil(0.99 * count) - 1],
        kl_most=ordered[-1],
        told=statistics.fmean(told),
        top1=equal / count,
        perplexity_a=math.exp(nats_a / count),
        perplexity_b=math.exp(nats_b / count),
    )


def _kl(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[float, float]:
    """(divergence in nats, A's probability on what both tell)."""
    both = a.keys() & b.keys()
    share_a, share_b = (math.fsum(math.exp(side[t]) for t in both) for side in (a, b))
    kl = math.fsum(math.exp(a[token]) * (a[token] - b[token]) for token in both)
    rest_a, rest_b = 1.0 - share_a, 1.0 - share_b
    if rest_a > _NOTHING:
        kl += rest_a * math.log(rest_a / max(rest_b, _NOTHING))
    return (kl if math.isnan(kl) else max(kl, 0.0)), share_a


def verdict(
    found: Divergence, recall_a: float | None, recall_b: float | None, limits: Mapping[str, float]
) -> dict[str, Any]:
    """Whether B may stand in for A; "failed" names what does not pass, and "judged" what was."""
    failed = []
    if not found.kl <= limits["kl"]:  # as what is no number is not
        failed.append(f"divergence {found.kl:.3g} above {limits['kl']:g}")
    if not found.perplexity_rise <= limits["perplexity_rise"]:
        rise, most = found.perplexity_rise, limits["perplexity_rise"]
        failed.append(f"perplexity risen by {rise:.2%}, above {most:.2%}")
    if found.top1 < limits["top1"]:
        failed.append(f"equal likeliest tokens {found.top1:.2%} below {limits['top1']:.2%}")
    judged = ["divergence", "perplexity", "likeliest tokens"]
    if recall_a is not None and recall_b is not None:
        judged.append("needles")
        if recall_a - recall_b > limits["recall_loss"]:
            lost = recall_a - recall_b
            failed.append(f"{lost:.2%} of the needles lost, above {limits['recall_loss']:.2%}")
    return {"passed": not failed, "failed": failed, "judged": judged, "thresholds": dict(limits)}


def plain(found: Divergence) -> dict[str, Any]:
    return {**asdict(found), "perplexity_rise": found.perplexity_rise}
