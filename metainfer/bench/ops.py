"""Every operation of a model at its real shapes: this package's kernels beside torch's own
composition and the best open kernels, taking turns in one run.

All sides work on the same inputs. The inputs of one series are different draws, as many as it takes
to exceed the caches; the first side's results are compared with the others' before anything is
timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch

from metainfer.bench.ops_settings import OpsLoad
from metainfer.core.errors import UserError
from metainfer.kernels.compare import near, tensors
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.inputs.load import LOADED
from metainfer.kernels.inputs.series import draw_one, draw_series
from metainfer.kernels.platform import Platform
from metainfer.kernels.timing import Stopwatch, Timed
from metainfer.kernels.verify import prepared
from metainfer.ops.base import Cost, Load
from metainfer.ops.catalogue import OPS
from metainfer.ops.floor import Rates, operands_of
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.use import Use

NOTHING = "none"
"""Name of the side of an operation that no backend runs."""

Side = Callable[[Any, Call], Timed]
"""(case, call) -> what runs it, everything prepared that a layer prepares once."""


@dataclass(frozen=True, slots=True)
class OpWork:
    """One operation at one case and size.

    Attributes:
        phase: "prefill" or "decode".
        times: how often one pass through the model runs it.
        served: a layer of a served model runs it.
    """

    model: str
    ranks: int
    op: str
    case: Any
    phase: str
    load: Load
    times: int = 1
    served: bool = False


@dataclass(slots=True)
class OpResult:
    """What was measured of one work.

    Attributes:
        seconds: name of the side -> one time per round.
        errors: largest difference from the first side over its largest number, by side.
        missing: name of the side -> why it was not measured.
    """

    work: OpWork
    cost: Cost
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def backend_sides(on: Platform, work: OpWork) -> dict[str, Side | str]:
    """This package's backends by name, the one that is chosen first; others that could run too,
    but for those that unpack weights beforehand. Where none can: why."""
    found: dict[str, Side | str] = {}
    try:
        chosen = on.registry.bind(work.op, work.case, on.target).backend
    except UserError:
        verdicts = on.registry.explain(work.op, work.case, on.target)
        reasons = [f"{name}: {verdict.reason}" for name, verdict in verdicts if name != REFERENCE]
        return {NOTHING: "; ".join(reasons) or "has no kernel yet"}
    backends = on.registry.backends(work.op)
    for name in (chosen, *backends):
        backend = backends[name]
        if name != REFERENCE and not backend.expands and backend.eligible(work.case, on.target):
            found.setdefault(name, partial(prepared, on, work.op, name))
    return found or {NOTHING: "the reference alone runs it"}


def measure(
    work: OpWork, sides: Mapping[str, Side | str], watch: Stopwatch, rounds: int
) -> OpResult:
    """Let all sides take turns at one operation; one that fails is named and costs no other."""
    result = OpResult(work, OPS[work.op].cost(work.case, work.load))
    inputs = partial(draw_one, work.op, work.case, work.load, watch.device)
    try:
        calls = draw_series(work.op, work.case, work.load, watch.device, 0)
    except Exception as error:  # such as more than memory holds
        result.missing[NOTHING] = f"no inputs: {_said(error)}"
        watch.wait()
        return result
    series: dict[str, tuple[list[Timed], float]] = {}
    first: list[torch.Tensor] | None = None
    for name, side in sides.items():
        if isinstance(side, str):
            result.missing[name] = side
            continue
        try:
            returned = tensors(side(work.case, inputs(0))())
            if first is None:
                first = returned
            else:
                result.errors[name] = difference(first, returned)
            del returned
            timed = [side(work.case, call) for call in calls]
            series[name] = timed, watch.warm(timed)
        except Exception as error:  # whatever a side raises
            result.missing[name] = _said(error)
            watch.wait()  # raises where a GPU has been lost to this process
    order = list(series)
    for number in range(rounds):
        for name in order if number % 2 else order[::-1]:
            timed, held_s = series[name]
            result.seconds.setdefault(name, []).append(watch.series_s(timed, held_s))
    result.seconds = {name: result.seconds[name] for name in order}
    return result


def _said(error: Exception) -> str:
    said = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {said}"


def selected(use: Use, load: OpsLoad) -> bool:
    """Whether `load` asks for this operation."""
    return fnmatch(use.op, load.ops) and use.op in LOADED


def difference(first: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Largest difference of results that both sides have as numbers of one shape; 0 for choices,
    whose order is open."""
    if any(ours.dtype is torch.int64 for ours in first):
        return 0.0
    return max(
        (
            near(theirs.float(), ours.float(), 1.0).error
            for ours, theirs in zip(first, other, strict=False)
            if ours.shape == theirs.shape and ours.is_floating_point()
        ),
        default=0.0,
    )


def floors(result: OpResult, rates: Rates) -> tuple[float, str]:
    """(seconds of the floor, what sets it) at the rates of one platform."""
    operands = operands_of(result.work.case)
    return rates.floor_s(result.cost, operands), rates.bound(result.cost, operands)
