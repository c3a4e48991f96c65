"""What torch's products are handed: shapes and scales as cuBLAS wants them; refusals. tests/gpu
compares results."""

from __future__ import annotations

import pytest
import torch

from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.inputs import linear as inputs
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.reference import linear as reference
from metainfer.kernels.reference.dequantise import fp8_block
from metainfer.kernels.torch_products import dense, scaled, torch_backends
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.kernels.triton.portable import PtxLauncher
from metainfer.ops.base import Target
from metainfer.ops.linear import DenseCase, Fp8RowsCase, GroupedFp8RowsCase
from tests.fakes.op_checks import assert_near

LAUNCH = JitLauncher((9, 0), 4)
HOPPER = Target("cuda", (9, 0))
ADA = Target("cuda", (8, 9))


def multiplied(a, b, scale_a, kind_a, scale_b, kind_b, output_dtype):
    """`scaled_mm` of torch for 1 x 128 and 128 x 128, with what cuBLAS demands of its arguments."""
    (rows, columns), outputs = a.shape, b.shape[1]
    assert (rows % 4, a.stride(1), b.stride(0), a.stride(0) % 16) == (0, 1, 1, 0)
    assert (scale_a.dtype, scale_b.dtype) == (torch.float32, torch.float32)
    assert (*scale_a.shape, *scale_a.stride()) == (rows, columns // 128, 1, rows)
    padded = -(-columns // 512) * 4
    assert (*scale_b.shape, *scale_b.stride()) == (padded, outputs // 128, 1, padded)
    x = a.float() * scale_a.repeat_interleave(128, 1)
    weight = fp8_block(b.T, scale_b.T[:, : columns // 128], (128, 128))
    return (x @ weight.T).to(output_dtype)


@pytest.mark.parametrize("rows", [65, 68, 131])
@pytest.mark.parametrize("spread", [False, True])
def test_scaled_products(monkeypatch: pytest.MonkeyPatch, rows: int, spread: bool) -> None:
    monkeypatch.setattr(scaled, "scaled_mm", multiplied)
    for case in (Fp8RowsCase(256, 640), Fp8RowsCase(128, 512, scale="fp32")):
        call = inputs.fp8_rows(case, Draw(1), rows, spread=spread)
        weight = scaled.prepare(case, *call.weights)
        y_TO = scaled.fp8_rows(LAUNCH, case, weight, *call.arguments)
        assert_near(y_TO, reference.fp8_rows(case, call.weights, *call.arguments), 1e-2)
    grouped = GroupedFp8RowsCase(3, 128, 256)
    call = inputs.grouped_fp8_rows(grouped, Draw(2), rows, spread=spread)
    weight = scaled.prepare(grouped, *call.weights)
    y_TO = scaled.grouped_fp8_rows(LAUNCH, grouped, weight, *call.arguments)
    expected = reference.grouped_fp8_rows(grouped, call.weights, *call.arguments)
    assert_near(y_TO, expected, 1e-2)
    assert y_TO.is_contiguous()


def test_few_rows_run_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "scaled_mm", None)
    monkeypatch.setattr(torch, "mm", None)
    case = Fp8RowsCase(128, 256)
    call = inputs.fp8_rows(case, Draw(3), 5)
    y_TO = scaled.fp8_rows(LAUNCH, case, scaled.prepare(case, *call.weights), *call.arguments)
    assert_near(y_TO, reference.fp8_rows(case, call.weights, *call.arguments), 1e-2)


def test_a_weight_in_two_parts_takes_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return (x.float() @ weight.float()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", product)
    case = DenseCase(40, 96, out_dtype="float32")
    call = inputs.dense(case, Draw(4), 70, dtype="float32")
    weight = dense.linear.prepare_dense(case, *call.weights)
    y_TO = dense.dense(LAUNCH, case, weight, *call.arguments)
    assert_near(y_TO, reference.dense(case, call.weights, *call.arguments), 1e-5)


def test_what_cublas_lacks_is_refused() -> None:
    assert scaled.whole_blocks(Fp8RowsCase(4096, 4096), HOPPER)
    for case, target, reason in (
        (Fp8RowsCase(4096, 4096), ADA, "on sm_90 alone"),
        (Fp8RowsCase(4096, 4096), Target("cpu"), "on sm_90 alone"),
        (Fp8RowsCase(4096, 4096, (32, 32), 32), HOPPER, "not of 32 x 32"),
        (Fp8RowsCase(2112, 4096), HOPPER, "2112 x 4096 are not whole blocks"),
        (Fp8RowsCase(4096, 4096, dtype="float32"), HOPPER, "are bf16"),
    ):
        assert reason in scaled.whole_blocks(case, target).reason


def test_orders() -> None:
    """Few rows have kernels of their own; torch has more rows before Triton, never as the code of
    another GPU."""
    registry = builtin_registry(LAUNCH)
    case = Fp8RowsCase(4096, 4096)
    assert registry.bind("linear.fp8_rows", case, HOPPER).backend == "cuda"
    without = "linear.fp8_rows=torch,triton"
    assert registry.bind("linear.fp8_rows", case, HOPPER, without).backend == "torch"
    assert registry.bind("linear.fp8_rows", case, ADA, without).backend == "triton"
    assert registry.bind("linear.dense", DenseCase(64, 64), ADA).backend == "cuda"
    assert registry.bind("linear.dense", DenseCase(65, 64), ADA).backend == "torch"
    able = registry.capabilities(ADA)
    assert able.default_order_of("linear.dense") == ("cuda", "torch", "triton")
    assert able.default_order_of("norm.rms_norm") == ("cuda", "triton", "torch")
    assert able.backend_of("linear.dense") == "cuda"
    assert torch_backends(PtxLauncher((8, 9), 132, driver=object())) == ()
