"""Open kernels in place of ours: what they are given means the same; they refuse with reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from metainfer.arch.tiny import tiny_arch
from metainfer.bench.stage import USUAL_STAGES, parse_setting
from metainfer.core.errors import UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.compare import compare
from metainfer.kernels.inputs.series import draw_one
from metainfer.kernels.open import PROJECTS, flashmla
from metainfer.kernels.reference import attention as plain
from metainfer.ops.attention import AttentionCase
from metainfer.ops.base import Load, Target
from metainfer.ops.kernel_order import OPEN
from metainfer.plan.settings import EngineSettings

HOPPER = Target("cuda", (9, 0))
CASES = (
    AttentionCase(64, 512, 16),
    AttentionCase(64, 512, 16, ratio=4, topk=8),
    AttentionCase(64, 512, 16, ratio=16),
    AttentionCase(64, 512, 16, ratio=4, topk=8, entry_format="v4_fp8"),
    AttentionCase(64, 512, 0, ratio=1, topk=8, rope_extra=64, scale=0.05, sink=False),
)


def sparse_fwd(
    q_THK: torch.Tensor,
    keys_N1K: torch.Tensor,
    rows_T1N: torch.Tensor,
    scale: float,
    width: int,
    sink_H: torch.Tensor | None,
    stops_T: torch.Tensor,
    use_legacy: bool,
) -> tuple[torch.Tensor, None, None]:
    """What FlashMLA's function of that name is documented to do, in fp32."""
    assert len(q_THK) and len(keys_N1K)  # it fails to describe tensors of nothing
    assert rows_T1N.dtype == stops_T.dtype == torch.int32
    assert (rows_T1N.shape[2] % 128, keys_N1K.dtype, use_legacy) == (0, torch.bfloat16, True)
    rows_TN = rows_T1N.squeeze(1)
    place_N = torch.arange(rows_TN.shape[1])
    hidden_TN = (rows_TN < 0) | (place_N >= stops_T.unsqueeze(1))
    keys_TNK = keys_N1K.squeeze(1)[rows_TN.clamp(min=0).long()].float()
    keys_TNK = keys_TNK.masked_fill(hidden_TN.unsqueeze(-1), 0.0)
    scores_THN = torch.einsum("thk,tnk->thn", q_THK.float(), keys_TNK) * scale
    scores_THN = scores_THN.masked_fill(hidden_TN.unsqueeze(1), -torch.inf)
    lse_TH = scores_THN.logsumexp(-1)
    out_THD = torch.einsum("thn,tnd->thd", scores_THN.softmax(-1), keys_TNK[..., :width])
    if sink_H is not None:
        out_THD *= torch.sigmoid(lse_TH - sink_H).unsqueeze(-1)
    return out_THD.to(q_THK.dtype), None, None


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("rows", "most_listed"), [(24, 2**26), (24, 600), (0, 600)])
def test_flashmla_is_given_what_the_op_means(
    case: AttentionCase, rows: int, most_listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashmla, "_MOST_LISTED", most_listed)
    op = "attention.sparse_prefill"
    call = draw_one(op, case, Load(rows, 90), "cpu", 1, "")
    ours = flashmla.attend(sparse_fwd, case, *call.arguments)
    theirs = plain.sparse_prefill(case, *call.arguments)
    found = compare(op, case, call, (ours,), (theirs,))
    assert not found.problem


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Sets what an import of FlashMLA gives."""

    def set_to(found: object) -> None:
        def import_module(name: str) -> Any:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(flashmla, "import_module", import_module)

    return set_to


def test_what_is_not_there_is_refused_with_a_reason(installed: Callable[[object], None]) -> None:
    case = CASES[1]
    installed(SimpleNamespace(flash_mla_sparse_fwd=sparse_fwd))
    assert flashmla.eligible(case, HOPPER)
    for target in (Target("cpu"), Target("cuda", (12, 0))):
        assert "on sm_90" in flashmla.eligible(case, target).reason
    assert "64 heads" in flashmla.eligible(replace(case, heads=4), HOPPER).reason
    assert "log-sum-exp" in flashmla.eligible(replace(case, lse=True), HOPPER).reason
    installed(ModuleNotFoundError("flash_mla"))
    assert flashmla.eligible(case, HOPPER).reason == "FlashMLA is not installed"
    installed(OSError("libcuda.so.1"))
    assert "does not load (OSError: libcuda.so.1)" in flashmla.eligible(case, HOPPER).reason
    with pytest.raises(UserError, match="open: FlashMLA does not load"):
        builtin_registry().bind("attention.sparse_prefill", case, HOPPER, f"*={OPEN}")


def test_only_the_open_setting_names_them() -> None:
    arch = tiny_arch()
    open_order = parse_setting("open", EngineSettings(), arch).engine.kernel_order
    assert open_order is not None
    assert {part.partition("=")[0] for part in open_order.split(";")} == set(PROJECTS)
    assert "open" not in USUAL_STAGES
    for stage in USUAL_STAGES:
        assert OPEN not in (parse_setting(stage, EngineSettings(), arch).engine.kernel_order or "")
    chosen = builtin_registry().bind("attention.sparse_prefill", CASES[0], Target("cpu"))
    assert chosen.backend != OPEN
