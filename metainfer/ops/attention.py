"""Contracts of attention over the sliding window and the chosen compressed entries."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Attributes:
    heads, width: H query heads and D, the width of the one latent that is key and value.
    window: W, tokens that a row sees directly, itself included.
    ratio: tokens per compressed entry; 0 where there are none.
    topk: entries that a row attends to at most; 0 where it attends to all that it sees.
    dtype: format of queries, products and result.
    """

    heads: int
    width: int
    window: int
    ratio: int = 0
    topk: int = 0
    dtype: str = "bfloat16"


def _keys(case: AttentionCase, tokens: int) -> int:
    entries = tokens // case.ratio if case.ratio else 0
    return min(tokens, case.window) + (min(entries, case.topk) if case.topk else entries)


def _prefill_cost(case: AttentionCase, load: Load) -> Cost:
    size = ELEMENT_BYTES[case.dtype]
    entries = load.tokens // case.ratio if case.ratio else 0
    rows = 2 * load.rows * case.heads + load.rows + case.window + entries
    flops = 4.0 * load.rows * case.heads * case.width * _keys(case, load.tokens)
    return Cost(flops, size * rows * case.width)


def _decode_cost(case: AttentionCase, load: Load) -> Cost:
    size = ELEMENT_BYTES[case.dtype]
    keys = _keys(case, load.tokens)
    flops = 4.0 * load.rows * case.heads * case.width * keys
    return Cost(flops, size * load.rows * case.width * (2 * case.heads + keys))


_CASES = {
    "deepseek-v4-flash": (
        AttentionCase(64, 512, 128),
        AttentionCase(64, 512, 128, ratio=4, topk=512),
        AttentionCase(64, 512, 128, ratio=128),
    ),
    "pebble": (
        AttentionCase(4, 512, 128),
        AttentionCase(4, 512, 128, ratio=4, topk=128),
        AttentionCase(4, 512, 128, ratio=128),
    ),
}
_SMALL = (
    AttentionCase(3, 24, 8, dtype="float32"),
    AttentionCase(2, 32, 8, ratio=4, topk=6, dtype="float32"),
    AttentionCase(2, 32, 16, ratio=16, dtype="float32"),
    AttentionCase(4, 64, 16, ratio=4, topk=8),
)

_FORMULA = """One softmax over the window and the entries together, with the scale D^-0.5. Each head
    has a sink: exp(sink) is added to the denominator alone, like a key of value 0. The latents
    are keys and values. out[t, h] = sum over keys n of softmax(q[t, h] . n) * n; the softmax is
    computed in fp32 and stable for any scores."""

SPARSE_PREFILL = Op(
    name="attention.sparse_prefill",
    doc=f"""Attention of consecutive rows of one sequence (prefill).

    {_FORMULA}

    Row t has the position p = start + t. It sees the latents of the positions p - W + 1 .. p, and
    of the entries below (p + 1) // ratio those that were chosen for it, or all.

    Arguments:
        q_THD: [T, H, D] in the case's dtype, dense.
        latents_ND: [N, D] in the case's dtype, dense: the latents of the N = halo + T positions
            start - halo .. start + T - 1. The halo holds min(start, W - 1) positions or more.
        start: position of the first row.
        sink_H: fp32 [H].
        entries_MD: entries of all sequences, [M, D], fp32 or bf16; None without compression.
        entry_rows_E: int64 [E], rows of entries_MD of this sequence's entries 0 .. E - 1; None
            without compression.
        selected_TK: int64 [T, K], distinct numbers of entries that row t sees, -1 where there is
            none; None where each row attends to all entries that it sees.

    Returns:
        out_THD: new, [T, H, D] in the case's dtype, dense.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_prefill_cost,
)

SPARSE_DECODE = Op(
    name="attention.sparse_decode",
    doc=f"""Attention of rows of different sequences over rows of the caches (decode).

    {_FORMULA}

    Arguments:
        q_THD: [T, H, D] in the case's dtype, dense.
        ring_ND: window latents of all sequences, [N, D], fp32 or bf16.
        window_rows_TW: int64 [T, W], rows of ring_ND that row t sees; -1 where there is none.
        sink_H: fp32 [H].
        entries_MD: entries of all sequences, [M, D], fp32 or bf16; None without compression.
        entry_rows_TK: int64 [T, K], rows of entries_MD that row t attends to; -1 where there is
            none; None without compression.

    Rows that are not listed are never read: they may hold anything, NaN included.

    Returns:
        out_THD: new, [T, H, D] in the case's dtype, dense.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_decode_cost,
)

OPS = (SPARSE_PREFILL, SPARSE_DECODE)
