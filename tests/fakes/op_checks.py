"""Whether a backend fulfils its op's contract at one case and variant, on any device."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.compare import Poisoned, changed, compare, near, run
from metainfer.kernels.registry import Registry
from metainfer.ops.kernel_order import REFERENCE
from tests.fakes.op_inputs import make

# Variants whose inputs leave nothing to rounding.
_EXACT = ("ties", "NaN")


def check(
    registry: Registry, op: str, backend: str, case: Any, variant: str, device: str = "cpu"
) -> None:
    """Runs `backend` on `device` and the reference on the CPU on equal inputs, and compares. On a
    GPU it runs once more: a kernel whose parts race gives other bits.

    Raises:
        AssertionError: a result is off, of another shape or format, or other the second time, or
            an argument was changed.
    """
    expected = run(registry, op, REFERENCE, case, make(op, case, variant))
    call = make(op, case, variant, device)
    with Poisoned():
        results = run(registry, op, backend, case, call)
    actual = tuple(result.cpu() for result in results)
    exact = variant in _EXACT
    found = compare(op, case, make(op, case, variant), actual, expected, exact)
    assert not found.problem, found.problem
    if op == "rope.rotate":
        assert results[0].data_ptr() == call.arguments[0].data_ptr()
    spoilt = changed(op, make(op, case, variant, device), call)
    assert not spoilt, spoilt
    if device != "cpu":
        again = run(registry, op, backend, case, make(op, case, variant, device))
        for first, second in zip(actual, again, strict=True):
            assert torch.equal(_bits(first), _bits(second.cpu())), "the second run gave other bits"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Differences are small against the largest expected number."""
    found = near(ours, theirs, tolerance)
    assert not found.problem, found.problem
