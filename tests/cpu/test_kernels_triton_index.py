"""The indexer in parts, in the interpreter against the reference: rows whose scores do not fit at a
time, and keys of several lists that are laid in order a piece at a time."""

from __future__ import annotations

import pytest

from metainfer.kernels.compare import Poisoned, compare, run
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.index import index_topk_ragged
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton import index, index_scores, triton_backends
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.kernels.triton.topk import row_bytes
from metainfer.ops.base import Target
from metainfer.ops.index import IndexCase
from metainfer.ops.kernel_order import REFERENCE

OP = "attention.index_topk"
LAUNCH = JitLauncher((9, 0), 4)
REGISTRY = Registry((*triton_backends(LAUNCH), *REFERENCE_BACKENDS))
PARTS = ((4402, 3), (31, 2))  # (first position, rows): 1,101 entries and 8
CASES = {
    "dense": IndexCase(4, 32, 40, dtype="float32"),
    "fp8": IndexCase(8, 128, 8, key_format="index_fp8"),
    "fp4, publishes": IndexCase(
        4, 128, 6, key_format="index_fp4", candidate_blocks=4, publishes=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_rows_and_of_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setattr(index_scores, "_SHARING_ROWS", 1)
    monkeypatch.setattr(index_scores, "ORDERED_BYTES", 1)  # 1,024 keys at a time, the least
    monkeypatch.setattr(index, "SCORE_BYTES", 2 * row_bytes(1104, case.topk))
    call = index_topk_ragged(case, Draw(4), PARTS, shuffled=True)
    rows, shape = len(call.arguments[1]), call.arguments[3].shape
    pieces = index_scores.pieces_in_order(LAUNCH, case, rows, shape)
    assert [piece.start for piece in pieces] == [0, 1024]
    assert index.rows_at_a_time(case, shape[1]) in (1, 2)
    with Poisoned():
        actual = run(REGISTRY, OP, "triton", case, call)
    expected = run(REGISTRY, OP, REFERENCE, case, call)
    found = compare(OP, case, call, actual, expected)
    assert not found.problem, found.problem
    assert (expected[0] >= 1024).any() and (expected[0] < 1024).any()


@pytest.mark.parametrize("size", [3, 6])
def test_candidate_blocks_of_other_sizes_are_refused(size: int) -> None:
    case = IndexCase(4, 32, 6, candidate_blocks=4, candidate_block=size)
    verdict = REGISTRY.backends(OP)["triton"].eligible(case, Target("cuda", (9, 0)))
    assert verdict.reason == f"takes blocks of a power of two of entries, not of {size}"
