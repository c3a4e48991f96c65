"""What finds a wrong backend: comparison with the reference, poisoned memory, changed arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from metainfer.kernels.compare import Poisoned, near
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.reference.norm import rms_norm
from metainfer.kernels.registry import Backend, Registry
from metainfer.ops.catalogue import OPS
from tests.fakes.op_checks import check

OP = "norm.rms_norm"
(CASE, _) = OPS[OP].small_cases


def all_but_the_last_row(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    y_TD = torch.empty_like(x_TD, dtype=torch.float32)
    y_TD[:-1] = rms_norm(case, x_TD, weight_D)[:-1]
    return y_TD


def slightly_off(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return rms_norm(case, x_TD, weight_D) * 1.001


def of_another_format(case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return rms_norm(case, x_TD, weight_D).bfloat16()


def with_its_argument_changed(
    case: Any, x_TD: torch.Tensor, weight_D: torch.Tensor
) -> torch.Tensor:
    y_TD = rms_norm(case, x_TD, weight_D)
    x_TD[0, 0] += 1
    return y_TD


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (all_but_the_last_row, "off by nan"),
        (slightly_off, "off by 0.00"),
        (of_another_format, "result 0 is torch.bfloat16"),
        (with_its_argument_changed, "argument 0 was changed"),
    ],
)
def test_a_wrong_backend_is_found(run: Callable[..., Any], problem: str) -> None:
    registry = Registry((Backend(OP, "wrong", run), *REFERENCE_BACKENDS))
    with pytest.raises(AssertionError, match=problem):
        check(registry, OP, "wrong", CASE, "7 rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_poisoned_memory_is_nan_until_it_is_written(dtype: torch.dtype) -> None:
    with Poisoned():
        made = [torch.empty(5, dtype=dtype), torch.zeros(1, dtype=dtype).new_empty(3)]
        assert all(tensor.float().isnan().all() for tensor in made)
        assert torch.zeros(2).eq(0).all()
        assert torch.empty(2, dtype=torch.int64).tolist() == [-1, -1]


def test_infinities_that_are_expected_are_no_difference() -> None:
    expected = torch.tensor([-torch.inf, 4.0])
    assert near(torch.tensor([-torch.inf, 4.02]), expected, 0.01).error == pytest.approx(0.005)
    assert near(torch.tensor([-3e38, 4.0]), expected, 0.01).problem
