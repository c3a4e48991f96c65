"""Whether a backend fulfils its op's contract at one case and variant, on any device."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.registry import Registry
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import REFERENCE
from tests.fakes.op_inputs import Call, make

# Arguments that an op may or must overwrite, by place.
_OVERWRITTEN = {
    "rope.rotate": {0},
    "rope.norm_rotate": {0},
    "hc.expand": {0},
    "moe.swiglu": {0},
}
_INDICES = ("attention.index_topk", "attention.index_topk_decode")


def run(registry: Registry, op: str, backend: str, case: Any, call: Call) -> tuple[Any, ...]:
    """The results of one backend as a tuple."""
    chosen = registry.backends(op)[backend]
    arguments = call.arguments
    if OPS[op].weights:
        prepare = chosen.prepare
        prepared = prepare(case, *call.weights) if prepare else call.weights
        arguments = (prepared, *arguments)
    result = chosen.run(case, *arguments)
    return result if isinstance(result, tuple) else (result,)


def check(
    registry: Registry, op: str, backend: str, case: Any, variant: str, device: str = "cpu"
) -> None:
    """Runs `backend` on `device` and the reference on the CPU on equal inputs, and compares.

    Raises:
        AssertionError: a result is off, of another shape or format, or an argument was changed.
    """
    expected = run(registry, op, REFERENCE, case, make(op, case, variant))
    call = make(op, case, variant, device)
    results = run(registry, op, backend, case, call)
    actual = tuple(result.cpu() for result in results)
    inputs = make(op, case, variant)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
    tolerance = OPS[op].tolerance.of(case.dtype)
    if op in _INDICES:
        _same_choice(case, variant, inputs, actual[0], expected[0], tolerance)
    elif op == "moe.route_learned":
        _same_routes(actual, expected, tolerance)
    else:
        for ours, theirs in zip(actual, expected, strict=True):
            assert_near(ours, theirs, tolerance)
    if op == "rope.rotate":
        assert results[0].data_ptr() == call.arguments[0].data_ptr()
    _nothing_changed(op, make(op, case, variant, device), call)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Differences are small against the largest expected number."""
    if ours.is_floating_point():
        largest = theirs.abs().amax() if theirs.numel() else 0.0
        difference = (ours.double() - theirs.double()).abs()
        assert (difference <= tolerance * float(largest)).all(), (
            f"off by {float(difference.max()):.3g} where the largest is {float(largest):.3g}"
        )
    else:
        assert torch.equal(ours, theirs)


def index_scores(case: Any, call: Call) -> torch.Tensor:
    """float64 [T, E] scores of every listed entry; NaN where they are NaN."""
    q_THI, weights_TH, keys_MI, rows = call.arguments[:4]
    keys = keys_MI[rows.clamp(min=0)].double().expand(len(q_THI), -1, -1)
    products_THE = q_THI.double() @ keys.transpose(1, 2)
    scale = (case.width * case.heads) ** -0.5
    return (weights_TH.double().unsqueeze(2) * products_THE.relu()).sum(1) * scale


def _same_choice(
    case: Any,
    variant: str,
    call: Call,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    tolerance: float,
) -> None:
    """As many entries, ascending and distinct; where a rounding lets the choice differ, entries
    whose true scores are equal within the tolerance."""
    assert torch.equal(ours < 0, theirs < 0)
    assert ((ours[:, 1:] > ours[:, :-1]) | (ours[:, 1:] < 0)).all()
    if variant in ("ties", "NaN"):
        assert torch.equal(ours, theirs)
        return
    scores_TE = index_scores(case, call)
    for scores_E, mine, other in zip(scores_TE, ours.tolist(), theirs.tolist(), strict=True):
        lost, won = sorted(set(other) - set(mine)), sorted(set(mine) - set(other))
        if lost:
            slack = tolerance * float(scores_E.abs().max())
            assert float(scores_E[lost].max() - scores_E[won].min()) <= slack


def _same_routes(
    actual: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
    tolerance: float,
) -> None:
    """The same experts with the same weights, in any order."""
    (ours, our_weights), (theirs, their_weights) = (
        (ids.sort(-1).values, weights.gather(1, ids.argsort(-1)))
        for ids, weights in (actual, expected)
    )
    assert torch.equal(ours, theirs)
    assert_near(our_weights, their_weights, tolerance)


def _nothing_changed(op: str, before: Call, after: Call) -> None:
    """Arguments and weights hold what they held, but for those that an op may overwrite."""
    for place, (old, new) in enumerate(zip(before.arguments, after.arguments, strict=True)):
        if place not in _OVERWRITTEN.get(op, ()) and isinstance(new, torch.Tensor):
            assert _bytes_equal(old, new), f"argument {place} was changed"
    for old, new in zip(_flat(before.weights), _flat(after.weights), strict=True):
        assert _bytes_equal(old, new), "a weight was changed"


def _flat(weights: tuple[Any, ...]) -> list[torch.Tensor]:
    return [t for w in weights for t in (w if isinstance(w, tuple) else (w,))]


def _bytes_equal(old: torch.Tensor, new: torch.Tensor) -> bool:
    old, new = old.contiguous(), new.contiguous()
    return torch.equal(old.view(torch.uint8), new.view(torch.uint8))
