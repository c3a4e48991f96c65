"""What tests of the references share: cases, calls, and turns of pairs of channels."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.compare import run
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import REFERENCE
from tests.fakes.op_checks import assert_near
from tests.fakes.op_inputs import Call

REGISTRY = builtin_registry()


def cases(op: str) -> list[Any]:
    return list(OPS[op].small_cases)


def reference(op: str, case: Any, call: Call) -> Any:
    result = run(REGISTRY, op, REFERENCE, case, call)
    return result if len(result) > 1 else result[0]


def near(op: str, case: Any, ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert_near(ours, expected, OPS[op].tolerance.of(case.dtype))


def turned(case: Any, x_THD: torch.Tensor, rotation_TR2: torch.Tensor) -> torch.Tensor:
    """Pairs of channels as complex numbers, multiplied."""
    first = 0 if getattr(case, "leading", False) else x_THD.shape[-1] - case.rope_width
    places = range(first, first + case.rope_width)
    half = case.rope_width // 2
    interleaved = getattr(case, "interleaved", True)
    one, other = (places[::2], places[1::2]) if interleaved else (places[:half], places[half:])
    angle = torch.view_as_complex(rotation_TR2.double().contiguous()).unsqueeze(1)
    angle = angle.conj() if getattr(case, "inverse", False) else angle
    y_THD = x_THD.double().clone()
    pairs = torch.complex(y_THD[..., list(one)], y_THD[..., list(other)]) * angle
    y_THD[..., list(one)], y_THD[..., list(other)] = pairs.real, pairs.imag
    return y_THD
