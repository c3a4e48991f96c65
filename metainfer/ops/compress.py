"""Contracts of the compressors, which pool windows of tokens into entries.

A token's row of compressor state is fp32 [value | score], the position bias already in the score.
Where windows overlap (`overlap`), value and score are two halves each, A and B, of the entry width:
entry w mixes the A halves of window w - 1 with the B halves of window w.

An entry depends on the rows of its span alone, so an incremental caller keeps no other state and
takes tokens back without copies. It keeps, per sequence, a ring of span rows and one more for each
draft token of a step; the token at position p is written at p modulo the rows of the ring.
Rows of tokens that were not accepted are overwritten by the tokens that come in their places, and
so are entries that such tokens closed: query position p sees entry w only where (p + 1) // ratio is
more than w, so none that is accepted saw them. A window closes anew when its true last token comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance


@dataclass(frozen=True, slots=True)
class CompressCase:
    """Attributes:
    ratio: tokens per window.
    width: D of an entry.
    rope_width: how many of the last channels are rotated; 0 for entries before the rope.
    overlap: whether an entry mixes two windows.
    eps: of the norm.
    dtype: format of the entries.
    """

    ratio: int
    width: int
    rope_width: int
    overlap: bool
    eps: float = 1e-6
    dtype: str = "bfloat16"

    @property
    def row_width(self) -> int:
        """fp32 numbers of state per token."""
        return 2 * self.width * (2 if self.overlap else 1)

    @property
    def span(self) -> int:
        """Tokens that one entry mixes."""
        return self.ratio * (2 if self.overlap else 1)


def _cost(case: CompressCase, load: Load) -> Cost:
    """Of the entries that so many rows complete."""
    return _entries_cost(case, load.rows / case.ratio)


def _decode_cost(case: CompressCase, load: Load) -> Cost:
    """Of so many entries, each from rows of its own."""
    return _entries_cost(case, load.rows)


def _entries_cost(case: CompressCase, entries: float) -> Cost:
    # Where windows overlap, half of the numbers of twice as many rows.
    numbers = entries * case.ratio * case.row_width
    kept = case.width * ELEMENT_BYTES[case.dtype] + 4 * case.rope_width
    return Cost(flops=4.0 * numbers, bytes=4.0 * numbers + entries * kept)


_CASES = {
    "deepseek-v4-flash": (
        CompressCase(4, 512, 64, overlap=True),
        CompressCase(4, 128, 64, overlap=True),
        CompressCase(128, 512, 64, overlap=False),
    ),
    # From this latent come the index key and, rotated, the entry. Ratio 1 is `norm.rms_norm`.
    "deepseek-v4.1-flash": (CompressCase(2, 512, 0, overlap=False, eps=1e-20),),
    "pebble": (
        CompressCase(4, 512, 64, overlap=True),
        CompressCase(4, 128, 64, overlap=True),
        CompressCase(128, 512, 64, overlap=False),
    ),
}
_SMALL = (
    CompressCase(4, 24, 8, overlap=True, dtype="float32"),
    CompressCase(16, 24, 8, overlap=False, dtype="float32"),
    CompressCase(4, 64, 32, overlap=True),
    CompressCase(128, 32, 32, overlap=False),
    CompressCase(2, 48, 0, overlap=False, eps=1e-20),
)

_FORMULA = """For each channel: softmax of the scores of the entry's tokens (those of window w, and
    where windows overlap also those of window w - 1; window -1 has no tokens), the sum of their
    values so weighted, rounded to the case's dtype; then `norm.rms_norm` with the weight, then
    `rope.rotate` at the position of the first token of window w."""

COMPRESS = Op(
    name="attention.compress",
    doc=f"""Entries of consecutive windows of one sequence that are all there (prefill).

    {_FORMULA}

    Arguments:
        rows_NW: fp32 [(E + overlap) * ratio, row width], the tokens of windows first_window
            (where windows overlap: first_window - 1) up to first_window + E - 1 in order; rows
            may lie apart.
        first_window: number of the first window. Where windows overlap and it is 0, the first
            `ratio` rows mean nothing and may hold anything.
        norm_weight_D: fp32 [D].
        rotation_ER2: fp32 [E, R / 2, 2], cosine and sine at the entries' positions.

    Returns:
        entries_ED: new, in the case's dtype.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_cost,
    tolerance=Tolerance(bfloat16=2e-2),
)

COMPRESS_DECODE = Op(
    name="attention.compress_decode",
    doc=f"""Entries of windows that close in a decode step, each of a sequence of its own, read
    from the rings.

    {_FORMULA}

    Arguments:
        ring_NW: fp32 [ring rows of all sequences, row width].
        ring_rows_CS: int64 [C, span], for each entry the ring rows of its tokens in order of
            position; -1 where there is no token (before the sequence). An entry without any token
            is zero: what a step of fixed size asks where no window closes.
        norm_weight_D: fp32 [D].
        rotation_CR2: fp32 [C, R / 2, 2], cosine and sine at the entries' positions.

    Returns:
        entries_CD: new, in the case's dtype.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_decode_cost,
    tolerance=Tolerance(bfloat16=2e-2),
)

COMPRESS_STEP = Op(
    name="attention.compress_step",
    doc="""A decode step of a compressor: the rows' state goes into the rings, and entries of
    windows that close (`attention.compress_decode`) go into a cache.

    Several rows may be of one sequence, one behind the other in order of position; rings then have
    so many rows more than a span that no row is overwritten which another one of the step reads.

    Arguments:
        state_TW: fp32 [T, row width], the position bias not yet in the score; rows may lie apart.
        bias_RW: fp32 [ratio, row width], what is added to a row of state.
        phase_T: int64, which row of it.
        ring_NW: fp32 [ring rows of all sequences, row width]; its rows ring_rows_T are written.
        ring_rows_T: int64; rows of padding may share one, which then holds anything.
        closing_TS: int64 [T, span], as in `attention.compress_decode`, for the window that a row
            closes; -1 everywhere where it closes none.
        norm_weight_D: fp32 [D].
        rotation_TR2: fp32 [T, R / 2, 2], cosine and sine at the entries' positions.
        cache_MD: fp32 or bf16 [rows, D]; its rows target_rows_T are written. None: nowhere.
        target_rows_T: int64; -1 where a row closes no window.

    Returns:
        entries_TD: new, in the case's dtype; zero where a row closes no window.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_decode_cost,
    tolerance=Tolerance(bfloat16=2e-2),
)

OPS = (COMPRESS, COMPRESS_DECODE, COMPRESS_STEP)
