"""Contracts of attention over the sliding window and the chosen compressed entries.

One latent per token is the key and the value of all heads. Caches keep latents of the window and
entries as numbers ("dense") or as bytes (`formats`); a format's name says how wide a row is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, seen_in_all
from metainfer.ops.formats import FORMATS

DENSE = "dense"


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Attributes:
    heads: H, query heads of this rank.
    width: D, channels of a value: the first of its key.
    window: W, tokens that a row sees directly, itself included; 0 where there is no window.
    ratio: tokens per compressed entry; 0 where there are none.
    topk: entries that a row attends to at most; 0 where it attends to all that it sees.
    dtype: format of queries, products and result.
    rope_extra: channels of a key that are not part of the value.
    window_format: how the ring keeps latents (decode): "dense" or a name of `formats.FORMATS`.
    entry_format: likewise for entries.
    lse: whether the log-sum-exp is returned too, for a merge with other shards of the keys.
    scale: of the scores; None for D^-0.5.
    sink: whether each head has a sink. Of the shards of one softmax one alone has it.
    """

    heads: int
    width: int
    window: int
    ratio: int = 0
    topk: int = 0
    dtype: str = "bfloat16"
    rope_extra: int = 0
    window_format: str = DENSE
    entry_format: str = DENSE
    lse: bool = False
    scale: float | None = None
    sink: bool = True

    @property
    def key_width(self) -> int:
        """K, channels of a key."""
        return self.width + self.rope_extra

    @property
    def score_scale(self) -> float:
        return self.width**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class MergeCase:
    """Attributes:
    heads, width: H and D of the results.
    dtype: format of the merged result.
    """

    heads: int
    width: int
    dtype: str = "bfloat16"


def shard_window(window: int, shards: int) -> int:
    """Tokens of the window that a row sees on one of so many shards at most."""
    return -(-window // shards)


def shard_cases(case: AttentionCase, shards: int) -> tuple[AttentionCase, MergeCase]:
    """How decode attends on a shard, to heads of all, where a rank alone attends as `case`; and how
    results come together. No shard has sinks: they are one result more."""
    on_shard = replace(
        case,
        heads=case.heads * shards,
        window=shard_window(case.window, shards),
        lse=True,
        sink=False,
    )
    return on_shard, MergeCase(case.heads, case.width, case.dtype)


def row_bytes(row_format: str, width: int, dtype: str) -> int:
    """Bytes of a cache row of `width` channels, dense ones in `dtype`."""
    if row_format == DENSE:
        return width * ELEMENT_BYTES[dtype]
    return FORMATS[row_format].row_bytes


def _keys(case: AttentionCase, tokens: int) -> tuple[int, int]:
    """Latents and entries that the last of `tokens` rows sees."""
    entries = tokens // case.ratio if case.ratio else 0
    return min(tokens, case.window), min(entries, case.topk) if case.topk else entries


def _flops(case: AttentionCase, keys: int) -> float:
    """Of so many pairs of a row and a key that it sees."""
    return 2.0 * case.heads * (case.key_width + case.width) * keys


def _query_and_result_bytes(case: AttentionCase, rows: int) -> int:
    channels = case.key_width + case.width
    numbers = rows * case.heads * channels * ELEMENT_BYTES[case.dtype]
    return numbers + (4 * rows * case.heads if case.lse else 0)


def _prefill_cost(case: AttentionCase, load: Load) -> Cost:
    latents = min(load.tokens, load.rows + case.window - 1) if case.window else 0
    keys = seen_in_all(load, 1, case.window) if case.window else 0
    entries = 0
    if case.ratio:
        entries = load.tokens // case.ratio
        keys += seen_in_all(load, case.ratio, case.topk or None)
    if case.topk:
        entries = min(entries, load.rows * case.topk)
    moved = latents * row_bytes(DENSE, case.key_width, case.dtype)
    moved += entries * row_bytes(case.entry_format, case.key_width, case.dtype)
    moved += 8 * load.rows * case.topk
    return Cost(_flops(case, keys), moved + _query_and_result_bytes(case, load.rows))


def _decode_cost(case: AttentionCase, load: Load) -> Cost:
    window, entries = _keys(case, load.tokens)
    listed = window * row_bytes(case.window_format, case.key_width, case.dtype)
    listed += entries * row_bytes(case.entry_format, case.key_width, case.dtype)
    moved = load.rows * (listed + 8 * (window + entries))
    flops = _flops(case, load.rows * (window + entries))
    return Cost(flops, moved + _query_and_result_bytes(case, load.rows))


def _merge_cost(case: MergeCase, load: Load) -> Cost:
    """Of two shards."""
    numbers = load.rows * case.heads * case.width
    return Cost(6.0 * numbers, 3 * numbers * ELEMENT_BYTES[case.dtype])


_V4 = (
    AttentionCase(64, 512, 128),
    AttentionCase(64, 512, 128, ratio=4, topk=512),
    AttentionCase(64, 512, 128, ratio=128),
)
_V41 = (
    AttentionCase(64, 512, 128),
    AttentionCase(64, 512, 128, ratio=2, topk=512),
    AttentionCase(64, 512, 128, ratio=1, topk=512),
)
# Absorbed MLA: the scale is (nope + rope)^-0.5, that of V3.2 times its YaRN factor squared.
_V32 = AttentionCase(
    128,
    512,
    0,
    ratio=1,
    topk=2048,
    rope_extra=64,
    scale=192**-0.5 * (0.1 * math.log(40) + 1) ** 2,
    sink=False,
)
_GLM = replace(_V32, heads=64, scale=256**-0.5)
_PEBBLE = (
    AttentionCase(4, 512, 128),
    AttentionCase(4, 512, 128, ratio=4, topk=128),
    AttentionCase(4, 512, 128, ratio=128),
)


def _kept(case: AttentionCase, window: str, entries: str) -> AttentionCase:
    """The case over byte formats; a layer without entries keeps none."""
    return replace(case, window_format=window, entry_format=entries if case.ratio else DENSE)


_PREFILL_CASES = {
    "deepseek-v4-flash": _V4 + tuple(_kept(case, DENSE, "v4_fp8") for case in _V4[1:]),
    "deepseek-v4.1-flash": _V41 + tuple(_kept(case, DENSE, "v41_fp4") for case in _V41[1:]),
    "deepseek-v3.2": (_V32, _kept(_V32, DENSE, "mla_fp8")),
    "glm-5.3": (_GLM, _kept(_GLM, DENSE, "mla_fp8")),
    "pebble": _PEBBLE,
}
_DECODE_CASES = {
    "deepseek-v4-flash": _V4 + tuple(_kept(case, "v4_fp8", "v4_fp8") for case in _V4),
    "deepseek-v4.1-flash": _V41 + tuple(_kept(case, "v41_fp8", "v41_fp4") for case in _V41),
    "deepseek-v3.2": (
        _V32,
        _kept(_V32, DENSE, "mla_fp8"),
        replace(_kept(_V32, DENSE, "mla_fp8"), lse=True),
    ),
    "glm-5.3": (
        _GLM,
        _kept(_GLM, DENSE, "mla_fp8"),
        replace(_kept(_GLM, DENSE, "mla_fp8"), lse=True),
    ),
    "pebble": _PEBBLE,
}
_MERGE_CASES = {"deepseek-v3.2": (MergeCase(128, 512),), "glm-5.3": (MergeCase(64, 512),)}

_SMALL = (
    AttentionCase(3, 24, 8, dtype="float32"),
    AttentionCase(2, 32, 8, ratio=4, topk=6, dtype="float32"),
    AttentionCase(2, 32, 16, ratio=16, dtype="float32"),
    AttentionCase(4, 64, 16, ratio=4, topk=8),
    AttentionCase(3, 32, 8, ratio=4, topk=6, dtype="float32", lse=True, scale=0.3),
    AttentionCase(5, 32, 0, ratio=1, topk=9, dtype="float32", rope_extra=16, lse=True, sink=False),
)
# Byte formats have one width each.
_SMALL_PREFILL = (
    *_SMALL,
    AttentionCase(2, 512, 8, ratio=4, topk=6, entry_format="v4_fp8"),
    AttentionCase(2, 512, 8, ratio=2, topk=6, entry_format="v41_fp4"),
    AttentionCase(2, 512, 0, 1, 6, rope_extra=64, entry_format="mla_fp8", sink=False),
    # More keys than a kernel takes at a time, in the window, in lists and of all entries.
    AttentionCase(3, 512, 80, ratio=2, topk=70, lse=True),
    # Whole groups of heads and tiles of keys.
    AttentionCase(64, 512, 64, ratio=4, topk=8, lse=True),
    AttentionCase(64, 512, 64, ratio=4, topk=8, entry_format="v4_fp8"),
    AttentionCase(128, 512, 64, ratio=2, topk=8, entry_format="v41_fp4"),
    AttentionCase(64, 512, 0, 1, 6, rope_extra=64, entry_format="mla_fp8", lse=True, sink=False),
)
_SMALL_DECODE = (
    *_SMALL,
    AttentionCase(2, 512, 8, 4, 6, window_format="v4_fp8", entry_format="v4_fp8", lse=True),
    AttentionCase(2, 512, 8, ratio=2, topk=6, window_format="v41_fp8", entry_format="v41_fp4"),
    AttentionCase(20, 512, 0, 1, 6, rope_extra=64, entry_format="mla_fp8", sink=False),
    # Channels that are no part of the value, beside few heads and beside whole groups.
    AttentionCase(8, 512, 0, 1, 6, rope_extra=64, entry_format="mla_fp8", lse=True, sink=False),
    AttentionCase(64, 512, 0, 1, 6, rope_extra=64, entry_format="mla_fp8", lse=True, sink=False),
    # A shard, and two formats in one call.
    replace(_kept(AttentionCase(32, 512, 4, 4, 6), "v4_fp8", "v4_fp8"), lse=True, sink=False),
    _kept(AttentionCase(64, 512, 8, 2, 6), "v41_fp8", "v41_fp4"),
    # Whole groups of heads.
    AttentionCase(64, 512, 8, 4, 6, window_format="v4_fp8", entry_format="v4_fp8"),
    AttentionCase(64, 512, 8, ratio=4, topk=6, lse=True),
)
_SMALL_MERGE = (MergeCase(3, 24, dtype="float32"), MergeCase(2, 64))

_FORMULA = """One softmax over the window and the entries together; a score is the product of query
    and key times the case's scale. Where the case has sinks, exp(sink) of the head is added to the
    denominator alone, like a key of value 0. A value is the first D channels of its key.
    out[t, h] = sum over keys n of softmax(q[t, h] . n) * n[:D]; the softmax is computed in fp32
    and stable for scores above -2e38. out is 0 where a row sees nothing."""

_RETURNS = """out_THD: new, [T, H, D] in the case's dtype, dense.
        lse_TH: where the case says so, fp32 [T, H]: the natural logarithm of the denominator, the
            sink included; -inf where a row sees nothing and has no sink."""

SPARSE_PREFILL = Op(
    name="attention.sparse_prefill",
    doc=f"""Attention of rows of any sequences over dense latents and cached entries (prefill).

    {_FORMULA}

    Rows of a sequence may come in any order and number; their latents lie one after the other.
    Row t, at position p, sees the latents of the positions p - W + 1 .. p that are not negative,
    and of its sequence's entries below (p + 1) // ratio those that were chosen for it, or all.

    Arguments:
        q_THK: [T, H, K] in the case's dtype, dense.
        positions_T: int64 [T].
        latents_ND: [N, K] in the case's dtype, dense; None without a window. Rows that nobody
            sees may hold anything.
        latent_rows_T: int64 [T], the row of latents_ND of row t itself; before it lie those of
            the min(p, W - 1) positions before p. None without a window.
        sink_H: fp32 [H]; None where the case has no sinks.
        entries: entries of all sequences: [M, K], fp32 or bf16, or uint8 [M, row_bytes] in the
            case's entry format; None without entries.
        entry_rows_BE: int64 [B, E], rows of `entries` of each sequence's entries 0 .. E - 1; what
            lies behind a sequence's last entry is never looked at. None without entries.
        sequence_T: int64 [T], the row of entry_rows_BE that row t looks at; None where all rows
            look at row 0.
        selected_TK: int64 [T, K'], distinct numbers of entries that row t sees, -1 where there is
            none; None where each row attends to all entries that it sees. At most E are seen.

    Returns:
        {_RETURNS}
    """,
    cases=_PREFILL_CASES,
    small_cases=_SMALL_PREFILL,
    cost=_prefill_cost,
)

SPARSE_DECODE = Op(
    name="attention.sparse_decode",
    doc=f"""Attention of rows of different sequences over listed rows of the caches (decode).

    {_FORMULA}

    Arguments:
        q_THK: [T, H, K] in the case's dtype, dense.
        ring: window latents of all sequences: [N, K], fp32 or bf16, or uint8 [N, row_bytes] in
            the case's window format; None without a window.
        window_rows_TW: int64 [T, W], rows of `ring` that row t sees; -1 where there is none. Rows
            of a draft block that see each other name each other here. None without a window.
        sink_H: fp32 [H]; None where the case has no sinks.
        entries: entries of all sequences, likewise, in the case's entry format; None without
            entries.
        entry_rows_TK: int64 [T, K'], rows of `entries` that row t attends to; -1 where there is
            none; None without entries.

    Rows that are not listed are never read: they may hold anything, NaN included.

    Returns:
        {_RETURNS}
    """,
    cases=_DECODE_CASES,
    small_cases=_SMALL_DECODE,
    cost=_decode_cost,
)

MERGE = Op(
    name="attention.merge",
    doc="""Merges results of attention over S shards of the keys into that over all keys.

    lse[t, h] = log sum over s of exp(lse_s[t, h]);
    out[t, h] = sum over s of exp(lse_s[t, h] - lse[t, h]) * out_s[t, h]. A shard in which a row
    sees nothing has the lse -inf and adds nothing; where no shard has anything, out is 0 and lse
    is -inf.

    Arguments:
        out_STHD: results of the shards, [S, T, H, D], fp32 or bf16, dense.
        lse_STH: fp32 [S, T, H], dense.

    Returns:
        out_THD: new, [T, H, D] in the case's dtype, dense.
        lse_TH: new, fp32 [T, H].
    """,
    cases=_MERGE_CASES,
    small_cases=_SMALL_MERGE,
    cost=_merge_cost,
)

OPS = (SPARSE_PREFILL, SPARSE_DECODE, MERGE)
