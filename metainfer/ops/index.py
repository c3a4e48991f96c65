"""Contracts of the lightning indexer, which chooses the entries that a row attends to."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op


@dataclass(frozen=True, slots=True)
class IndexCase:
    """Attributes:
    heads, width: H and I of the index queries.
    topk: K, entries chosen at most.
    ratio: tokens per entry.
    dtype: format of queries and products.
    """

    heads: int
    width: int
    topk: int
    ratio: int = 4
    dtype: str = "bfloat16"


def _cost(case: IndexCase, load: Load) -> Cost:
    size = ELEMENT_BYTES[case.dtype]
    entries = load.tokens // case.ratio
    flops = 2.0 * load.rows * case.heads * (case.width + 1) * entries
    moved = size * (load.rows * case.heads * case.width + entries * case.width)
    return Cost(flops, moved + 8.0 * load.rows * case.topk)


def _decode_cost(case: IndexCase, load: Load) -> Cost:
    size = ELEMENT_BYTES[case.dtype]
    entries = load.tokens // case.ratio
    flops = 2.0 * load.rows * case.heads * (case.width + 1) * entries
    moved = size * load.rows * case.width * (case.heads + entries)
    return Cost(flops, moved + 8.0 * load.rows * case.topk)


_CASES = {"deepseek-v4-flash": (IndexCase(64, 128, 512),), "pebble": (IndexCase(64, 128, 128),)}
_SMALL = (
    IndexCase(16, 32, 8, dtype="float32"),
    IndexCase(3, 16, 5, dtype="float32"),
    IndexCase(64, 32, 8),
)

_FORMULA = """score[t, e] = I^-0.5 H^-0.5 * sum over h of weights[t, h] * relu(q[t, h] . key[e])

    The K best of the entries that the row sees; all of them where there are no more than K. Of
    equal scores the entry with the lower number wins; a NaN score ranks as the worst. The
    Hadamard rotation and the fp4 rounding of the released model are not applied: the rotation
    leaves the products as they are."""

INDEX_TOPK = Op(
    name="attention.index_topk",
    doc=f"""Chooses entries for consecutive rows of one sequence (prefill).

    {_FORMULA}

    Arguments:
        q_THI: [T, H, I] in the case's dtype, dense.
        weights_TH: fp32 [T, H], as projected, not scaled; rows may lie apart.
        keys_MI: index keys of all sequences, [M, I], fp32 or bf16.
        key_rows_E: int64 [E], rows of keys_MI of this sequence's entries 0 .. E - 1.
        start: position of the first row. Row t sees the entries below (start + t + 1) // ratio,
            at most E.

    Returns:
        ids_TK: int64 [T, K], entry numbers in ascending order, then -1.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_cost,
)

INDEX_TOPK_DECODE = Op(
    name="attention.index_topk_decode",
    doc=f"""Chooses entries for rows of different sequences (decode).

    {_FORMULA}

    Arguments:
        q_THI: [T, H, I] in the case's dtype, dense.
        weights_TH: fp32 [T, H], as projected, not scaled; rows may lie apart.
        keys_MI: index keys of all sequences, [M, I], fp32 or bf16.
        key_rows_TE: int64 [T, E], rows of keys_MI of the entries that each row sees, in order;
            -1 after the last.

    Returns:
        ids_TK: int64 [T, K], entry numbers in ascending order, then -1.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_decode_cost,
)

OPS = (INDEX_TOPK, INDEX_TOPK_DECODE)
