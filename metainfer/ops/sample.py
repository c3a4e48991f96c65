"""Contracts of sampling: what requests change in their logits, the draw, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import Cost, Load, Op

NOT_FINITE, NOTHING_LEFT = 1, 2
"""Why a row has no token, as `sample.draw` says it; 0 where it has one."""

WEIGHT_BITS = 40
"""Weights of tokens are whole numbers, 2^40 for the likeliest: their sums are exact, whoever adds
them in whatever order, and 2^23 tokens of that weight fit in 64 bits."""


@dataclass(frozen=True, slots=True)
class SampleCase:
    """Attributes:
    vocab: V, tokens of the vocabulary.
    dtype: of logits.
    """

    vocab: int
    dtype: str = "float32"

    @property
    def stretch(self) -> int:
        """L, tokens of a stretch: the power of two next to the root of V, from above."""
        power = 1
        while power * power < self.vocab:
            power *= 2
        return power

    @property
    def stretches(self) -> int:
        """G, the last maybe in part."""
        return -(-self.vocab // self.stretch)


def _adjust_cost(case: SampleCase, load: Load) -> Cost:
    return Cost(float(load.rows * case.vocab), load.rows * case.vocab * 8.0)


def _read_once(case: SampleCase, load: Load) -> Cost:
    # A subtraction, a product, the exponential and a sum for each token.
    return Cost(4.0 * load.rows * case.vocab, load.rows * (case.vocab * 4.0 + 64.0))


_CASES = {
    "deepseek-v4-flash": (SampleCase(129_280),),
    "deepseek-v4.1-flash": (SampleCase(129_280),),
    "deepseek-v3.2": (SampleCase(129_280),),
    "glm-5.3": (SampleCase(154_880),),
    "pebble": (SampleCase(8_192),),
}
_SMALL = (SampleCase(5), SampleCase(100), SampleCase(1000), SampleCase(4096))

ADJUST = Op(
    name="sample.adjust",
    doc="""What requests change in their logits, in this order.

        allowed: tokens outside the row's list, if it has one, get -inf.
        banned: tokens of the list get -inf.
        bias: is added to the logits of the list.
        penalties: of tokens seen, n times in the output (0: in the prompt alone):
            x > 0 ? x / repetition : x * repetition, then minus frequency * n, and minus presence
            where n > 0.

    Arguments:
        logits_RV: fp32 [R, V], dense.
        starts_R5: int64 [R, 5], ascending: of row r the allowed are the entries from starts[r, 0]
            to starts[r, 1] - 1, the banned follow up to starts[r, 2], biases up to starts[r, 3],
            the seen up to starts[r, 4]. A row with no allowed ones may have all.
        ids_N: int64 [N], tokens of all lists; distinct within a list.
        values_N: fp32 [N], the bias, or n of the seen; others are ignored.
        recent_RP: int64 [R, P], tokens of the output that the lists do not count yet, each counts
            once, in any order, -1 where there is none; P may be 0. Rows may lie apart. They count
            only in rows whose penalties are not those of factors (1, 0, 0).
        factors_R3: fp32 [R, 3], repetition, frequency, presence.

    Returns:
        adjusted_RV: fp32 [R, V], dense; the logits are left as they are.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_adjust_cost,
)

DRAW = Op(
    name="sample.draw",
    doc="""Draws a token of each row, with luck that depends on the row's key alone.

    x are the row's adjusted logits, m the greatest of them.

    A row of inverse temperature 0 is greedy: the token of x = m, the lowest of several. Others:

        y[i] = (x[i] - m) * inverse temperature, in fp32
        w[i] = floor(exp(y[i]) * 2^40), whole numbers of 64 bits; exp in fp32

    Kept are the tokens with y >= margin (the logarithm of min_p), of these the top_k of greatest x
    (0: all), and of these the fewest of greatest x whose weights add up to as much as
    floor(top_p * the weight of all of these), a product in fp64, and to 1 at least; top_p = 1: all.
    Of equal x lower tokens are greater.

    The draw is a race of exponential clocks in two heats, between stretches of L tokens (the last
    maybe in part; L is of the case) and then between the tokens of the stretch that won:

        S[g] = the sum of w over the kept tokens of stretch g
        the stretch of the greatest S[g] / E[g], the lowest of several; S as the next fp32
        the token j of it of the greatest w[j] / E[G + j] among the kept, the lowest of several

    E[n] is made of word n % 4 of Philox4x32-10 (Salmon et al. 2011) with the counter
    (n // 4, 0, low half of position, high half of position) and the key (low half of seed, high
    half of seed), halves of 32 bits:

        v = word * 2^-32 + 2^-33, at most 1 - 2^-24, in fp32
        E = v + v^2/2 + v^3/3 + v^4/4 + v^5/5 + v^6/6 for v < 1/16, else -log(1 - v)

    exp and log are right to a few units in the last place, which decides dead heats alone.

    Arguments:
        logits_RV: fp32 [R, V], dense, as the model made them.
        adjusted_RV: fp32 [R, V], dense; None where that is the same.
        rules_R3: fp32 [R, 3], inverse temperature, top_p, margin (-inf where there is none); None
            where all rows are greedy.
        numbers_R3: int64 [R, 3], top_k, seed, position; None together with rules_R3.
        filters: whether a row may have a top_k, top_p or margin that drops a token.

    Returns:
        drawn_2R: int64 [2, R]. First the tokens; 0 where there is none. Then why not: 1 where a
            logit, as the model made it, is not finite, else 2 where no adjusted one is above -inf,
            else 0.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_read_once,
)

LOGPROBS = Op(
    name="sample.logprobs",
    doc="""Log-probabilities of given tokens and of the likeliest ones.

        logprob[r, i] = logits[r, i] - log(sum over j of exp(logits[r, j]))

    Arguments:
        logits_RV: fp32 [R, V], dense, finite; of other rows the results are arbitrary, and the
            tokens among them 0 to V - 1.
        tokens_R: int64 [R].
        top: K, how many of the likeliest, 0 to 20; no more than V.

    Returns:
        logprobs_R: fp32 [R], of the given tokens.
        tops_RK: fp32 [R, K], the greatest first.
        top_tokens_RK: int64 [R, K], their tokens, the lower first of equal ones.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_read_once,
)

OPS = (ADJUST, DRAW, LOGPROBS)
