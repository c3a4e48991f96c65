"""Contracts of the lightning indexer, which chooses the entries that a row attends to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, seen_in_all
from metainfer.ops.formats import INDEX_FORMATS

DENSE = "dense"


@dataclass(frozen=True, slots=True)
class IndexCase:
    """Attributes:
    heads, width: H and I of the index queries.
    topk: K, entries chosen at most.
    ratio: tokens per entry.
    dtype: format of dense queries and of their products.
    key_format: "dense": queries and keys are plain numbers; or a name of `INDEX_FORMATS`: both are
        pairs of codes and scales.
    candidate_blocks: B, blocks of entries that one layer names and later layers search in; 0 where
        no layer does.
    candidate_block: entries of such a block.
    publishes: this use names the candidates; with B > 0 and without it, it is given them.
    gives_rows: in decode, entries are named by their rows in the lists; not with candidates.
    gives_scores: in decode, scores are returned too, for a choice among those of several shards of
        the entries; not with candidates.
    """

    heads: int
    width: int
    topk: int
    ratio: int = 4
    dtype: str = "bfloat16"
    key_format: str = DENSE
    candidate_blocks: int = 0
    candidate_block: int = 8
    publishes: bool = False
    gives_rows: bool = False
    gives_scores: bool = False

    @property
    def searches_candidates(self) -> bool:
        return self.candidate_blocks > 0 and not self.publishes


def decode_case(case: IndexCase) -> IndexCase:
    """As decode steps use it where prefill uses `case`: attention wants rows of a cache."""
    return replace(case, gives_rows=not case.candidate_blocks)


def shard_case(case: IndexCase) -> IndexCase:
    """As decode steps use it where each rank has a shard of the entries."""
    return replace(case, gives_scores=True)


def key_bytes(case: IndexCase) -> int:
    """Bytes of one index key, and of one head's query."""
    if case.key_format == DENSE:
        return ELEMENT_BYTES[case.dtype] * case.width
    form = INDEX_FORMATS[case.key_format]
    return form.code_bytes + form.scale_bytes


def _scored(case: IndexCase, load: Load) -> int:
    entries = load.tokens // case.ratio
    if case.searches_candidates:
        return min(entries, case.candidate_blocks * case.candidate_block)
    return entries


def _flops(case: IndexCase, scores: int) -> float:
    return 2.0 * case.heads * (case.width + 1) * scores


def _row_bytes(case: IndexCase) -> float:
    """Queries, head weights, ids and candidates of one row."""
    numbers = case.topk + case.candidate_blocks
    scores = 4.0 * case.topk if case.gives_scores else 0.0
    return case.heads * (key_bytes(case) + 4.0) + 8.0 * numbers + scores


def _cost(case: IndexCase, load: Load) -> Cost:
    # Rows of one sequence share their keys; candidates are at least those of one row.
    moved = load.rows * _row_bytes(case) + _scored(case, load) * (key_bytes(case) + 8)
    most = case.candidate_blocks * case.candidate_block if case.searches_candidates else None
    return Cost(_flops(case, seen_in_all(load, case.ratio, most)), moved)


def _decode_cost(case: IndexCase, load: Load) -> Cost:
    # A key, and where it is listed.
    moved = load.rows * (_row_bytes(case) + _scored(case, load) * (key_bytes(case) + 8))
    return Cost(_flops(case, load.rows * _scored(case, load)), moved)


_V4 = IndexCase(64, 128, 512)
_V41 = IndexCase(32, 128, 512, ratio=2, key_format="index_fp4")
_V41_PUBLISHES = replace(_V41, ratio=1, candidate_blocks=2048, publishes=True)
_V32 = IndexCase(64, 128, 2048, ratio=1, key_format="index_fp8")
_GLM = replace(_V32, heads=32)

_CASES = {
    "deepseek-v4-flash": (
        replace(_V4, key_format="index_fp4"),
        replace(_V4, key_format="index_fp8"),
        _V4,
    ),
    "deepseek-v4.1-flash": (_V41, _V41_PUBLISHES, replace(_V41_PUBLISHES, publishes=False)),
    "deepseek-v3.2": (_V32, replace(_V32, key_format=DENSE)),
    "glm-5.3": (_GLM, replace(_GLM, key_format=DENSE)),
    "pebble": (IndexCase(64, 128, 128),),
}
_SHARDED = ("deepseek-v4-flash", "pebble")  # what the engine runs
_SMALL = (
    IndexCase(16, 32, 8, dtype="float32"),
    IndexCase(3, 16, 5, dtype="float32"),
    IndexCase(64, 32, 8),
    IndexCase(8, 128, 8, key_format="index_fp8"),
    IndexCase(4, 128, 6, key_format="index_fp4"),
    IndexCase(4, 32, 6, 4, "float32", candidate_blocks=4, candidate_block=2, publishes=True),
    IndexCase(4, 32, 6, 4, "float32", candidate_blocks=4, candidate_block=2),
    IndexCase(8, 128, 9, 2, key_format="index_fp4", candidate_blocks=3, candidate_block=4),
)

_FORMULA = """score[t, e] = I^-0.5 H^-0.5 * sum over h of weights[t, h] * relu(q[t, h] . key[e])

    The K best of the entries that the row sees; all of them where there are no more than K. Of
    equal scores the entry with the lower number wins; a NaN score ranks as the worst. The sum is
    in fp32 or better, and so is the comparison: the choice is exact for the scores as computed.

    Queries and keys come as they are multiplied: rotated (rope, and the Hadamard matrix where the
    model has one) and rounded. Of coded ones the products are of the decoded numbers.

    Candidates: entries fall into blocks of `candidate_block`, the last maybe in part. A case that
    publishes also names the B best of the blocks that hold an entry which the row sees. A block
    is as good as its best entry that the row sees; the newest block is always among the B; of
    equal blocks the lower number wins. A case that searches candidates chooses among the entries
    of the given blocks alone, as if the row saw no others."""

_ARGUMENTS = """q: [T, H, I] in the case's dtype, dense; or codes uint8 [T, H, C] and scales uint8
            [T, H, S], dense, as a pair.
        weights_TH: fp32 [T, H], as projected, not scaled; rows may lie apart.
        keys: index keys of all sequences, [M, I], fp32 or bf16, dense; or codes uint8 [M, C] and
            scales uint8 [M, S], dense, as a pair."""

_CANDIDATES = """\
candidates_TB: int64 [T, B], dense, numbers of distinct blocks in ascending order, each with
            an entry that the row sees, -1 after the last; None unless the case searches them."""

_RETURNS = """ids_TK: int64 [T, K], entry numbers in ascending order, then -1.
        blocks_TB: int64 [T, B], block numbers in ascending order, then -1; of cases that publish
            alone, as the second of a pair."""

INDEX_TOPK = Op(
    name="attention.index_topk",
    doc=f"""Chooses entries for rows that share lists of entries (prefill).

    {_FORMULA}

    Arguments:
        {_ARGUMENTS}
        key_rows_BE: int64 [B, E], rows of the keys of each sequence's entries 0 .. E - 1, -1 after
            the last; rows may lie apart. Every entry that a row sees is listed.
        sequence_T: int64 [T], which list of key_rows_BE belongs to each row; None where all rows
            have the first. Any order is right; rows of one sequence that lie together are faster.
        positions_T: int64 [T], positions of the rows. Row t sees the entries below
            (position + 1) // ratio, at most E.
        {_CANDIDATES}

    Returns:
        {_RETURNS}
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_cost,
)

INDEX_TOPK_DECODE = Op(
    name="attention.index_topk_decode",
    doc=f"""Chooses entries for rows with a list of entries each (decode).

    {_FORMULA}

    Arguments:
        {_ARGUMENTS}
        key_rows_TE: int64 [T, E], rows of the keys of the entries that each row sees, in order;
            -1 after the last. Rows may lie apart. E may be far beyond what is listed.
        {_CANDIDATES}

    Returns:
        {_RETURNS}
        Where the case gives rows, rows_TK in place of ids_TK: what key_rows_TE has for each of
        these entries, then -1.
        Where the case gives scores, (ids_TK or rows_TK, scores_TK): fp32 [T, K], the score of each
        of them as it was compared, NaN as the least finite number; then -inf.
    """,
    cases={
        name: (
            *(decode_case(case) for case in cases),
            *(shard_case(case) for case in cases if name in _SHARDED),
        )
        for name, cases in _CASES.items()
    },
    small_cases=(
        *_SMALL,
        IndexCase(16, 32, 8, dtype="float32", gives_rows=True),
        IndexCase(8, 128, 8, key_format="index_fp8", gives_rows=True),
        IndexCase(16, 32, 8, dtype="float32", gives_scores=True),
        IndexCase(64, 32, 8, gives_rows=True, gives_scores=True),
        IndexCase(4, 128, 6, key_format="index_fp4", gives_scores=True),
    ),
    cost=_decode_cost,
)

OPS = (INDEX_TOPK, INDEX_TOPK_DECODE)
