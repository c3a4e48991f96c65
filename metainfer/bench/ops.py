"""Every operation of a model at its real shapes: this package's kernels beside torch's own
composition and the best open kernels, taking turns in one run.

All sides work on the same inputs. The inputs of one series are different draws, as many as it takes
to exceed the caches; the first side's results are compared with the others' before anything is
timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch

from metainfer.bench.ops_settings import OpsLoad
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

Side = Callable[[Any, Call], Timed]
"""(case, call) -> what runs it, everything prepared that a layer prepares once."""


@dataclass(frozen=True, slots=True)
class OpWork:
    """One operation at one case and size.

    Attributes:
        phase: "prefill" or "decode".
        uses: how often one forward pass of the model calls it; 0 where that was not counted.
    """

    model: str
    ranks: int
    op: str
    case: Any
    phase: str
    load: Load
    uses: int = 0


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


def backend_sides(on: Platform, work: OpWork) -> Iterator[tuple[str, Side | str]]:
    """(name, side or why there is none) of this package's backends: on a GPU the one that is
    chosen, on a CPU all that keep weights as they are stored."""
    backends = on.registry.backends(work.op)
    found = False
    for name, backend in backends.items():
        if name == REFERENCE or backend.expands:
            continue
        verdict = backend.eligible(work.case, on.target)
        if verdict:
            found = True
            yield name, partial(prepared, on, work.op, name)
        elif on.device == "cuda" and name == "triton":
            yield name, verdict.reason
    if not found and on.device == "cuda" and "triton" not in backends:
        yield "triton", "no kernel yet"


def measure(
    load: OpsLoad,
    works: Sequence[OpWork],
    sides_of: Callable[[OpWork], Mapping[str, Side | str]],
    device: str,
    on_progress: Callable[[int, int], None],
) -> list[OpResult]:
    """All works in order; those that the time budget does not reach are left out."""
    watch = Stopwatch(device)
    began_s = time.perf_counter()
    results = []
    for done, work in enumerate(works):
        on_progress(done, len(works))
        if load.budget_s is not None and time.perf_counter() - began_s > load.budget_s:
            break
        results.append(_measure_one(work, sides_of(work), watch, load.rounds))
        if device == "cuda":
            torch.cuda.empty_cache()
    return results


def selected(use: Use, load: OpsLoad) -> bool:
    """Whether `load` asks for this operation."""
    return fnmatch(use.op, load.ops) and use.op in LOADED


def _measure_one(
    work: OpWork, sides: Mapping[str, Side | str], watch: Stopwatch, rounds: int
) -> OpResult:
    result = OpResult(work, OPS[work.op].cost(work.case, work.load))
    inputs = partial(draw_one, work.op, work.case, work.load, watch.device)
    calls = draw_series(work.op, work.case, work.load, watch.device, 0)
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
            result.seconds[name] = []
        except Exception as error:  # one side must not cost the others
            result.missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            _free(watch.device)
    order = list(series)
    for number in range(rounds):
        for name in order if number % 2 else order[::-1]:
            timed, held_s = series[name]
            result.seconds[name].append(watch.series_s(timed, held_s))
    return result


def difference(first: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Largest difference of results that both sides have as numbers of one shape."""
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


def _free(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
