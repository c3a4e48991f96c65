"""Contract of the index of a decode step: which cache rows its rows read and write."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import Cost, Load, Op


@dataclass(frozen=True, slots=True)
class Windows:
    """Compressor windows of one ratio.

    Attributes:
        ratio: tokens of an entry of its own.
        span: tokens that an entry mixes.
    """

    ratio: int
    span: int


@dataclass(frozen=True, slots=True)
class StepIndexCase:
    """Attributes:
    window: W, latents that a row sees, its own included.
    windows: of each ratio that a layer has.
    rope_width: R.
    block_tokens: of a block of the tables on one shard; every ratio divides it.
    dtype: of angles.
    shards: over which the entries of a sequence are divided.
    shard: which of them this is.
    """

    window: int
    windows: tuple[Windows, ...]
    rope_width: int
    block_tokens: int = 128
    dtype: str = "float32"
    shards: int = 1
    shard: int = 0


def _cost(case: StepIndexCase, load: Load) -> Cost:
    """Lists are written, angles are read and written, tables are read."""
    entries = sum(load.tokens // of.ratio // case.shards for of in case.windows)
    spans = sum(of.span for of in case.windows)
    numbers = case.window + spans + entries + load.tokens // (case.block_tokens * case.shards)
    angles = (2 + len(case.windows)) * case.rope_width
    return Cost(2.0 * load.rows * (numbers + angles), load.rows * (8 * numbers + 8 * angles))


_V4 = (Windows(4, 8), Windows(128, 128))

INDEX_DECODE = Op(
    name="step.index_decode",
    doc="""All that the layers of a decode step read or write by row number, in shapes that do not
    depend on what the arguments hold. (Division rounds down; what is "% n" is never negative.)

    A ring of n rows keeps position p of the sequence in slot s at row s n + p % n: window rings
    have W + draft rows, compressor rings of a ratio its span + draft rows. Entry e of a ratio lies
    in block e / (block_tokens / ratio) of its sequence's table, with as many rows a block. A row
    at position p sees the entries below (p + 1) / ratio, and closes a window where (p + 1) % ratio
    is 0. A row at position -1 is padding: it sees nothing and closes nothing.

    Shards: a block has block_tokens tokens on each of `shards` shards, on shard r the r-th part of
    its tokens. So entry e lies on shard e / (block_tokens / ratio) % shards, in the block e /
    (block_tokens / ratio * shards), and a shard has its entries in the order of the sequence. Of
    entries that lie on other shards none is seen here, and their windows close there.

    Angles of a position are the row of a table, or, where all tables of blocks together could
    hold more positions than it has rows, cosine and sine of position * frequency in fp32.

    Arguments:
        positions_T: int64, or -1.
        slots_T: int64.
        tables_NM: int64 [slots, M], blocks of each slot's sequence, -1 where there is none; rows
            may lie apart.
        draft_rows: that rings hold beyond what is visible.
        sliding, compressing: (fp32 table [positions, R / 2, 2], fp32 frequencies [R / 2]) of layers
            without and with entries.

    Returns:
        sliding_TR2, compressing_TR2: fp32 [T, R / 2, 2], angles of each row; padding has those of
            position 0.
        ring_rows_T: int64, where each row's latent goes in the window ring.
        window_rows_TW: int64, rows of the window ring that each row sees, the oldest first, itself
            last; -1 where there is none.
        Then for each ratio of the case:
        phase_T: int64, position % ratio.
        ring_rows_T: int64, where each row's state goes in the compressor ring.
        closing_TS: int64 [T, span], ring rows of the tokens of the window that a row closes, in
            order; -1 before the sequence, and everywhere where it closes none.
        target_rows_T: int64, where that entry goes; -1 where there is none.
        rotation_TR2: fp32 [T, R / 2, 2], angles of that entry: of the first of its own tokens, or
            where there is none, of those of the window that is open.
        entry_rows_TE: int64 [T, M block_tokens / ratio + 1], rows of the entries that each row
            sees; -1 behind the last.
    """,
    cases={
        "deepseek-v4-flash": (
            StepIndexCase(128, _V4, 64),
            StepIndexCase(128, _V4, 64, shards=2, shard=1),
        ),
        "pebble": (StepIndexCase(128, _V4, 64),),
    },
    small_cases=(
        StepIndexCase(12, (Windows(4, 8), Windows(16, 16)), 8, block_tokens=16),
        StepIndexCase(5, (Windows(2, 4),), 4, block_tokens=16),
        StepIndexCase(8, (), 6, block_tokens=16),
        StepIndexCase(5, (Windows(2, 4), Windows(8, 8)), 4, block_tokens=8, shards=2, shard=1),
        StepIndexCase(12, (Windows(4, 8), Windows(16, 16)), 8, block_tokens=16, shards=3),
    ),
    cost=_cost,
)

OPS = (INDEX_DECODE,)
