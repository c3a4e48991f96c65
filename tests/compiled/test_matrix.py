"""Models, layouts and kinds of card that stand for all, at one step of prefill, and of decode with
one row and with many: the kernels that they need are there, compile and fit. `make soak` goes
through the whole matrix.

Facts of code that was compiled before come from the user's cache, as with the command.
"""

from __future__ import annotations

import os

import pytest

from metainfer.arch.families import read_attention
from metainfer.kernels.coverage import Request, Row, cover
from metainfer.ops.targets import CARD_KINDS
from metainfer.ops.use import Use
from metainfer.ops.uses import uses_of

pytestmark = pytest.mark.timeout(800)

_ENTRY_FORMATS = ("v4_fp8", "v41_fp4", "mla_fp8")
MATRIX = (
    ("deepseek-v4-flash", 8, "sm_120"),
    ("deepseek-v4-flash", 8, "sm_89"),
    ("glm-5.3", 8, "sm_80"),
    ("deepseek-v4.1-flash", 8, "sm_86"),
    ("deepseek-v3.2", 1, "sm_90"),
    ("deepseek-v4-flash", 1, "sm_90"),
    ("deepseek-v4-flash", 4, "sm_100"),
)
WHOLE = MATRIX[0]
"""Of it all that there is, to the longest sequence; of the others attention and the choice of
entries, over caches in the released formats."""


def uses_for(key: tuple[str, int, str]) -> tuple[Use, ...]:
    model, ranks, _ = key
    uses = uses_of(model, ranks, "attention")
    released = (read_attention(model).indexer.key_formats[0], *_ENTRY_FORMATS)
    return uses if key == WHOLE else tuple(use for use in uses if attends(use, released))


def attends(use: Use, formats: tuple[str, ...]) -> bool:
    if not use.op.startswith(("attention.sparse_", "attention.index_")):
        return False
    return getattr(use.case, "key_format", getattr(use.case, "entry_format", "")) in formats


@pytest.fixture(scope="module")
def covered() -> dict[tuple[str, int, str], tuple[Row, ...]]:
    """Rows by model, ranks and kind of card, all compiled by the same processes."""
    requests = [Request(uses_for(key), CARD_KINDS[key[2]]) for key in MATRIX]
    longest = read_attention(WHOLE[0]).max_model_len
    requests[MATRIX.index(WHOLE)] = Request(uses_for(WHOLE), CARD_KINDS[WHOLE[2]], longest)
    workers = min(4, len(os.sched_getaffinity(0)))
    found = cover(requests, workers, prefill_rows=(8192,), decode_rows=(1, 64))
    return dict(zip(MATRIX, found, strict=True))


@pytest.mark.parametrize("key", MATRIX)
def test_attention_is_covered(
    covered: dict[tuple[str, int, str], tuple[Row, ...]], key: tuple[str, int, str]
) -> None:
    rows = covered[key]
    assert rows
    told = [f"{row.use.op} {row.use.case} {row.phase}: {row.problems}" for row in rows]
    assert not [line for row, line in zip(rows, told, strict=True) if not row.ok]
    for row, line in zip(rows, told, strict=True):
        if row.use.op.startswith(("attention.sparse_", "attention.index_")):
            assert row.matrix, line
            assert "emulated" not in row.matrix, line
