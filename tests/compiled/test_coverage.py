"""Coverage of single uses, with the package's own backends and with ones that fall short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from metainfer.kernels import coverage
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.compare import run
from metainfer.kernels.coverage import Request, Row, cover
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.load import at_load
from metainfer.kernels.reference import BACKENDS as REFERENCES
from metainfer.kernels.registry import Registry, no
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.attention import AttentionCase
from metainfer.ops.base import Load
from metainfer.ops.index import IndexCase
from metainfer.ops.norm import RmsNormCase
from metainfer.ops.targets import CARD_KINDS
from metainfer.ops.use import DECODE, PREFILL, Use
from tests.compiled.kernels import product

NORM = Use("norm.rms_norm", RmsNormCase(512), times=43)


def launching(**constants: Any) -> Declared:
    """A backend of the norm that launches a product with these constants."""

    def run(launch: Any, case: RmsNormCase, x_TD: Any, weight_D: Any) -> Any:
        y_TD = torch.empty_like(x_TD)
        launch(product, (len(x_TD),), x_TD, x_TD, y_TD, 512, TYPE=None, **constants)
        return y_TD

    return Declared("norm.rms_norm", run)


def covered(monkeypatch: Any, cache: Path, *backends: Declared, kind: str = "sm_89") -> list[Row]:
    """Rows of the norm where these are all the backends that there are."""

    def registry(launch: Any) -> Registry:
        return Registry((*(declared.bind(launch) for declared in backends), *REFERENCES))

    monkeypatch.setattr(coverage, "builtin_registry", registry)
    (rows,) = cover([Request((NORM,), CARD_KINDS[kind])], 1, prefill_rows=(8192,), cache=cache)
    return list(rows)


def test_a_kernel_of_the_package_is_covered(tmp_path: Path) -> None:
    (rows,) = cover([Request((NORM,), CARD_KINDS["sm_89"])], 1, cache=tmp_path)
    assert [row.phase for row in rows] == [PREFILL, DECODE]
    for row in rows:
        assert row.ok
        assert (row.backend, row.launches, row.torch_calls) == ("triton", 1, ())
        assert row.most("registers") > 16
        assert row.matrix == ()
        assert "num_warps=" in row.pieces[0].constants


def test_entries_too_many_to_be_decoded_are_covered(tmp_path: Path) -> None:
    case = AttentionCase(8, 512, 128, ratio=4, topk=512, entry_format="v4_fp8")
    use = Use("attention.sparse_prefill", case, (PREFILL,))
    request = Request((use,), CARD_KINDS["sm_120"], longest=2**20)
    ((row,),) = cover([request], 1, prefill_rows=(8192,), cache=tmp_path)
    assert row.ok, row.problems
    names = {piece.kernel for piece in row.pieces}
    assert names == {"decode_listed", "list_rows", "prefill_pairs", "prefill_plain"}


def test_the_choice_for_several_sequences_is_looked_at() -> None:
    """Which compiles otherwise than that of one, and lays no keys in order for few rows of each."""
    case, op = IndexCase(64, 128, 512, key_format="index_fp8"), "attention.index_topk"
    launched = {}
    for sequences in (1, 256):
        launch = RecordingLauncher((9, 0), 132)
        call = at_load(op, case, Load(8192, 2**20, sequences), Draw(0, "meta"))
        run(builtin_registry(launch), op, "triton", case, call)
        launched[sequences] = set(launch.units())
    names = {count: {unit.name for unit in units} for count, units in launched.items()}
    assert names[1] - names[256] == {"order_keys"}
    scores = [unit for units in launched.values() for unit in units if unit.name == "index_logits"]
    assert len(set(scores)) == len(scores) == 2


def test_what_only_the_reference_serves_is_not_covered(monkeypatch: Any, tmp_path: Path) -> None:
    (row, _) = covered(monkeypatch, tmp_path)
    assert (row.backend, row.ok) == ("", False)
    assert row.problem == "only the reference serves it"
    assert ("triton", "has no kernel for it") in row.refused

    refuses = Declared("norm.rms_norm", print, lambda case, target: no("is shy of 512"))
    (row, _) = covered(monkeypatch, tmp_path, refuses)
    assert ("triton", "is shy of 512") in row.refused
    assert not row.ok


def test_a_better_backend_that_refuses_is_told(monkeypatch: Any, tmp_path: Path) -> None:
    better = Declared("norm.rms_norm", print, lambda *_: no("not this one"), name="cuda")
    rows = covered(monkeypatch, tmp_path, better, launching(M=16, N=16, num_warps=1))
    assert [row.backend for row in rows] == ["triton", "triton"]
    assert all(row.refused == (("cuda", "not this one"),) for row in rows)


def test_code_that_does_not_fit_or_compile_is_told(monkeypatch: Any, tmp_path: Path) -> None:
    large = launching(M=256, N=256, num_warps=8, num_stages=3)
    (row, _) = covered(monkeypatch, tmp_path, large)
    assert row.problem == ""
    assert row.pieces[0].problem.startswith("needs ")
    assert row.pieces[0].problem.endswith(" bytes of shared memory of 101376")
    assert not row.ok

    wrong = launching(M=16, N=17, num_warps=1)
    (row, _) = covered(monkeypatch, tmp_path, wrong)
    assert row.pieces[0].code is None
    assert row.pieces[0].problem.startswith("does not compile: ")
    assert not row.ok


def test_a_backend_that_looks_at_contents_is_told(monkeypatch: Any, tmp_path: Path) -> None:
    looks = Declared("norm.rms_norm", lambda launch, case, x, w: x[:, : int(x.sum())], on_gpu)
    (row, _) = covered(monkeypatch, tmp_path, looks)
    assert row.problem.startswith("8192 rows cannot be recorded: ")


def test_torch_calls_are_told(monkeypatch: Any, tmp_path: Path) -> None:
    torch_only = Declared("norm.rms_norm", lambda launch, case, x, w: x.view(-1)[2:].sort()[0])
    (row, _) = covered(monkeypatch, tmp_path, torch_only)
    assert row.torch_calls == ("sort",)
    assert (row.launches, row.ok) == (0, True)
    nothing = Declared("norm.rms_norm", lambda launch, case, x, w: torch.empty_like(x))
    (row, _) = covered(monkeypatch, tmp_path, nothing)
    assert row.problem == "it launches nothing"


@pytest.mark.parametrize("kind", CARD_KINDS)
def test_the_shared_memory_of_every_card_is_known(kind: str) -> None:
    from metainfer.kernels.triton.launch import SHARED_BYTES, TARGETS

    assert CARD_KINDS[kind].capability in SHARED_BYTES
    assert {one.capability for one in CARD_KINDS.values()} == set(TARGETS)
