"""The exact choice of the K best, in the interpreter, against a stable sort: any scores, any
length, rows that are split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from metainfer.kernels.compare import Poisoned
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.kernels.triton.topk import Sizes, best, padded_width, sizes

LAUNCH = JitLauncher((9, 0), 4)
LEAST = torch.finfo(torch.float32).min
SMALL = Sizes(
    groups=64, tile=512, words=32, capacity=128, warps=4, registers=64, programs=2, part=1024
)

Scores = Callable[[int, int], torch.Tensor]


def nearly_all(rows: int, width: int, common: float) -> torch.Tensor:
    return torch.where(torch.rand(rows, width) < 0.97, common, torch.randn(rows, width))


SCORES: dict[str, Scores] = {
    "normal": torch.randn,
    "far from zero": lambda rows, width: 1000 + torch.randn(rows, width),
    "ties": lambda rows, width: torch.randint(-2, 3, (rows, width)).float(),
    "zeros of both signs": lambda rows, width: torch.randn(rows, width).sign() * 0.0,
    "ascending": lambda rows, width: torch.arange(width).float().repeat(rows, 1),
    "descending": lambda rows, width: -torch.arange(width).float().repeat(rows, 1),
    "NaN": lambda rows, width: nearly_all(rows, width, torch.nan),
    "least numbers": lambda rows, width: nearly_all(rows, width, LEAST),
    "infinities": lambda rows, width: nearly_all(rows, width, torch.inf),
    "nothing": lambda rows, width: nearly_all(rows, width, -torch.inf),
}


def expected(scores_E: torch.Tensor, topk: int) -> list[int]:
    if len(scores_E) <= topk:
        chosen = list(range(len(scores_E)))
    else:
        known = torch.where(scores_E.isnan(), LEAST, scores_E)
        order = known.argsort(descending=True, stable=True).tolist()
        chosen = sorted([place for place in order if known[place] > -torch.inf][:topk])
    return chosen + [-1] * (topk - len(chosen))


def check(make: Scores, rows: int, width: int, topk: int, form: Sizes) -> None:
    torch.manual_seed(rows * width + topk)
    scores_TW = torch.full((rows, padded_width(width, topk, form)), torch.nan)
    scores_TW[:, :width] = make(rows, width)
    seen_T = torch.randint(0, width + 1, (rows,), dtype=torch.int32)
    seen_T[:1] = width
    out_TK = torch.full((rows, topk), -7)
    with Poisoned():
        best(LAUNCH, topk, scores_TW, seen_T, width, out_TK, form=form)
    for row, seen in enumerate(seen_T.tolist()):
        assert out_TK[row].tolist() == expected(scores_TW[row, :seen], topk)


@pytest.mark.parametrize("name", SCORES)
def test_any_scores(name: str) -> None:
    """Few of many, in one piece: by the bound, and by cuts where the buffer overflows."""
    for topk, width in ((1, 700), (37, 3000), (64, 65)):
        check(SCORES[name], 2, width, topk, SMALL)


@pytest.mark.parametrize("name", ["normal", "ties", "ascending", "NaN"])
def test_sizes_that_run(name: str) -> None:
    check(SCORES[name], 1, 9000, 512, sizes(512))
    check(SCORES[name], 1, 6000, 2048, sizes(2048))


@pytest.mark.parametrize("name", ["normal", "ties", "descending", "nothing"])
def test_split_rows(name: str) -> None:
    check(SCORES[name], 1, 5000, 64, SMALL)
    check(SCORES[name], 2, 3000, 8, SMALL)


def test_no_rows_and_nothing_seen() -> None:
    check(torch.randn, 0, 100, 8, SMALL)
    out_TK = torch.full((2, 8), -7)
    scores_TW = torch.zeros(2, padded_width(0, 8))
    best(LAUNCH, 8, scores_TW, torch.zeros(2, dtype=torch.int32), 0, out_TK)
    assert (out_TK == -1).all()


def test_places_in_candidate_blocks() -> None:
    """Columns are entries of listed blocks; a row that sees no more than K has all of its own."""
    blocks_TB = torch.tensor([[0, 3, 7], [2, 5, -1], [1, -1, -1]])
    seen_T = torch.tensor([12, 8, 3], dtype=torch.int32)
    scores_TW = torch.full((3, padded_width(12, 4)), torch.nan)
    scores_TW[:, :12] = torch.tensor([5.0, 1, 9, 2, 8, 3, 7, 4, 6, 0, 11, 10])
    out_TK = torch.full((3, 4), -7)
    best(LAUNCH, 4, scores_TW, seen_T, 12, out_TK, blocks_TB, 4)
    assert out_TK.tolist() == [[2, 12, 30, 31], [8, 10, 20, 22], [4, 5, 6, -1]]
