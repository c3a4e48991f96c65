"""The references of compressors, indexer and attention against a second formulation: loops, sorts
and sums in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from metainfer.kernels.compare import block_scores, entry_numbers, index_scores, run
from metainfer.kernels.reference.formats import decode_rows
from metainfer.ops.attention import AttentionCase, MergeCase
from metainfer.ops.kernel_order import REFERENCE
from tests.fakes.op_checks import assert_near
from tests.fakes.op_inputs import Call, make
from tests.fakes.reference_checks import REGISTRY, cases, near, reference, turned


def entry(case: Any, rows: list[torch.Tensor | None], weight_D: torch.Tensor) -> torch.Tensor:
    """One pooled and normed entry, from the rows of its span (None where there is no token)."""
    pooled = torch.zeros(case.width, dtype=torch.float64)
    total = torch.zeros(case.width, dtype=torch.float64)
    halves = case.row_width // 2
    for place, row in enumerate(rows):
        if row is None:
            continue
        half = case.width if case.overlap and place >= case.ratio else 0
        value, score = (row[at + half : at + half + case.width] for at in (0, halves))
        pooled += score.exp() * value
        total += score.exp()
    pooled /= total
    return pooled / (pooled @ pooled / case.width + case.eps).sqrt() * weight_D


@pytest.mark.parametrize("variant", ["from the start", "later"])
@pytest.mark.parametrize("case", cases("attention.compress"), ids=str)
def test_compress(case: Any, variant: str) -> None:
    call = make("attention.compress", case, variant)
    rows_NW, first, weight_D, rotation_ER2 = call.arguments
    entries = []
    for number in range(len(rotation_ER2)):
        begin = number * case.ratio
        rows = list(rows_NW[begin : begin + case.span].double())
        if case.overlap and first + number == 0:
            rows[: case.ratio] = [None] * case.ratio
        entries.append(entry(case, rows, weight_D.double()))
    expected = turned(case, torch.stack(entries)[:, None], rotation_ER2)[:, 0]
    near("attention.compress", case, reference("attention.compress", case, call), expected)


@pytest.mark.parametrize("case", cases("attention.compress_decode"), ids=str)
def test_compress_decode(case: Any) -> None:
    op = "attention.compress_decode"
    call = make(op, case, "5 entries")
    ring_NW, ring_rows_CS, weight_D, rotation_CR2 = call.arguments
    entries = [
        entry(case, [None if r < 0 else ring_NW[r].double() for r in rows], weight_D.double())
        for rows in ring_rows_CS.tolist()
    ]
    expected = turned(case, torch.stack(entries)[:, None], rotation_CR2)[:, 0]
    near(op, case, reference(op, case, call), expected)


def chosen(most: int, scores: list[float]) -> list[int]:
    """The best by a sort of plain tuples, NaN last, -inf never."""
    seen = (n for n in range(len(scores)) if scores[n] != -math.inf)
    best = sorted(sorted(seen, key=lambda n: (math.isnan(scores[n]), -scores[n], n))[:most])
    return best + [-1] * (most - len(best))


def check_choice(op: str, case: Any, variant: str) -> None:
    call = make(op, case, variant)
    ids_TK, *blocks = run(REGISTRY, op, REFERENCE, case, call)
    scores_TK = blocks.pop() if case.gives_scores else None
    if case.gives_rows:
        ids_TK = entry_numbers(call.arguments[3], ids_TK)
    for row in range(len(ids_TK)):
        scores_E = index_scores(case, call, row)
        assert ids_TK[row].tolist() == chosen(case.topk, scores_E.tolist())
        if scores_TK is not None:
            plain_E = scores_E.nan_to_num(nan=torch.finfo(torch.float32).min)
            own_K = ids_TK[row][ids_TK[row] >= 0]
            assert torch.allclose(scores_TK[row, : len(own_K)].double(), plain_E[own_K], atol=1e-4)
            assert bool((scores_TK[row, len(own_K) :] == -torch.inf).all())
        if blocks:
            scores = block_scores(case, scores_E.nan_to_num(torch.finfo(torch.float64).min))
            assert blocks[0][row].tolist() == chosen(case.candidate_blocks, scores.tolist())


@pytest.mark.parametrize("variant", ["65 rows", "fewer entries", "ties", "NaN", "ragged"])
@pytest.mark.parametrize("case", cases("attention.index_topk"), ids=str)
def test_index_topk(case: Any, variant: str) -> None:
    check_choice("attention.index_topk", case, variant)


@pytest.mark.parametrize("variant", ["8 rows", "few entries", "ties", "NaN", "padded"])
@pytest.mark.parametrize("case", cases("attention.index_topk_decode"), ids=str)
def test_index_topk_decode(case: Any, variant: str) -> None:
    check_choice("attention.index_topk_decode", case, variant)


def attend(
    case: Any, q_HK: torch.Tensor, keys: list[torch.Tensor], sink_H: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row, key after key: out and lse."""
    outputs, lses = [], []
    for head in range(case.heads):
        scores = [float(q_HK[head] @ key) * case.score_scale for key in keys]
        sinks = [] if sink_H is None else [float(sink_H[head])]
        most = max([*scores, *sinks], default=0.0)
        total = sum(math.exp(score - most) for score in [*scores, *sinks])
        output = torch.zeros(case.width, dtype=torch.float64)
        for score, key in zip(scores, keys, strict=True):
            output += math.exp(score - most) / total * key[: case.width]
        outputs.append(output)
        lses.append(most + math.log(total) if total else -math.inf)
    return torch.stack(outputs), torch.tensor(lses)


def plain(case: Any, cache: torch.Tensor, row_format: str) -> torch.Tensor:
    """float64 [N, K]: a cache in numbers."""
    return (cache if row_format == "dense" else decode_rows(row_format, cache)).double()


def check_attention(op: str, case: Any, call: Call, expected: list[Any]) -> None:
    result = reference(op, case, call)
    out_THD, lse_TH = result if case.lse else (result, None)
    near(op, case, out_THD, torch.stack([out for out, _ in expected]))
    if lse_TH is not None:
        near(op, case, lse_TH, torch.stack([lse for _, lse in expected]))


PREFILL = ["67 rows", "start", "long halo", "all entries", "sharp", "ragged", "rows in any order"]


@pytest.mark.parametrize("variant", PREFILL)
@pytest.mark.parametrize("case", cases("attention.sparse_prefill"), ids=str)
def test_sparse_prefill(case: Any, variant: str) -> None:
    op = "attention.sparse_prefill"
    call = make(op, case, variant)
    q_THK, positions_T, latents_ND, latent_rows_T, sink_H, *table = call.arguments
    entries, entry_rows_BE, sequence_T, selected_TK = table
    if entries is not None:
        entries_MK = plain(case, entries, case.entry_format)
    expected = []
    for row, q_HK in enumerate(q_THK.double()):
        position = int(positions_T[row])
        keys = []
        if latents_ND is not None:
            own = int(latent_rows_T[row])
            first = own - min(position, case.window - 1)
            keys += [latents_ND[at].double() for at in range(first, own + 1)]
        if entries is not None:
            numbers = range((position + 1) // case.ratio)
            if selected_TK is not None:
                numbers = [e for e in selected_TK[row].tolist() if e >= 0]
            sequence = 0 if sequence_T is None else int(sequence_T[row])
            keys += [entries_MK[entry_rows_BE[sequence, e]] for e in numbers]
        expected.append(attend(case, q_HK, keys, sink_H))
    check_attention(op, case, call, expected)


@pytest.mark.parametrize("variant", ["4 rows", "full lists", "no columns", "sharp"])
@pytest.mark.parametrize("case", cases("attention.sparse_decode"), ids=str)
def test_sparse_decode(case: Any, variant: str) -> None:
    op = "attention.sparse_decode"
    call = make(op, case, variant)
    q_THK, ring, window_rows_TW, sink_H, entries, entry_rows_TK = call.arguments
    lists = []
    if ring is not None:
        lists.append((plain(case, ring, case.window_format), window_rows_TW))
    if entries is not None:
        lists.append((plain(case, entries, case.entry_format), entry_rows_TK))
    expected = []
    for row, q_HK in enumerate(q_THK.double()):
        keys = [cache[r] for cache, rows in lists for r in rows[row].tolist() if r >= 0]
        expected.append(attend(case, q_HK, keys, sink_H))
    check_attention(op, case, call, expected)


def test_shards_of_the_keys_merge_to_the_whole() -> None:
    op = "attention.sparse_decode"
    whole = AttentionCase(3, 24, 8, ratio=4, topk=10, dtype="float32", lse=True)
    q_THD, ring_ND, window_rows_TW, sink_H, entries_MD, entry_rows_TK = make(
        op, whole, "4 rows"
    ).arguments
    first = Call((), (q_THD, ring_ND, window_rows_TW, sink_H, entries_MD, entry_rows_TK[:, :4]))
    second = Call((), (q_THD, None, None, None, entries_MD, entry_rows_TK[:, 4:]))
    parts = (
        reference(op, whole, first),
        reference(op, replace(whole, window=0, sink=False), second),
    )
    merged = reference(
        "attention.merge",
        MergeCase(3, 24, "float32"),
        Call((), tuple(torch.stack(part) for part in zip(*parts, strict=True))),
    )
    for ours, theirs in zip(merged, reference(op, whole, make(op, whole, "4 rows")), strict=True):
        assert_near(ours, theirs, 1e-6)
