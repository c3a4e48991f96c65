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
from metainfer.kernels.inputs.base import Call, Draw
from metainfer.kernels.inputs.load import LOADED, at_load
from metainfer.kernels.platform import Platform
from metainfer.kernels.timing import Stopwatch, Timed
from metainfer.ops.base import Cost, Load
from metainfer.ops.catalogue import OPS
from metainfer.ops.floor import Rates, operands_of
from metainfer.ops.kernel_order import REFERENCE

_MOST_COPIES = 16
_MOST_INPUT_BYTES = 8 * 2**30
_CACHE_BYTES: Mapping[str, int] = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
"""What a series touches at least, so that each call finds its inputs in memory."""

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
            yield name, partial(_backend_side, on, work.op, name)
        elif on.device == "cuda" and name == "triton":
            yield name, verdict.reason
    if not found and on.device == "cuda" and "triton" not in backends:
        yield "triton", "no kernel yet"


def _backend_side(on: Platform, op: str, name: str, case: Any, call: Call) -> Timed:
    backend = on.registry.backends(op)[name]
    arguments = call.arguments
    if OPS[op].weights:
        prepare = backend.prepare
        prepared = prepare(case, *call.weights) if prepare else call.weights
        arguments = (prepared, *arguments)
    return partial(backend.run, case, *arguments)


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


def selected(op: str, load: OpsLoad) -> bool:
    """Whether `load` asks for this operation."""
    products = op.startswith(("linear.", "moe."))
    return fnmatch(op, load.ops) and op in LOADED and not (load.part == "attention" and products)


def draw_calls(work: OpWork, device: str) -> list[Call]:
    """As many different inputs as a series needs."""
    calls: list[Call] = []
    touched = 0.0
    wanted = _CACHE_BYTES[device]
    moved = OPS[work.op].cost(work.case, work.load).bytes
    while not calls or (len(calls) < _MOST_COPIES and touched < wanted):
        calls.append(_draw(work, device, len(calls)))
        touched += moved
        held = sum(t.nbytes for t in tensors((calls[-1].weights, calls[-1].arguments)))
        if held * (len(calls) + 1) > _MOST_INPUT_BYTES:
            break
    return calls


def _draw(work: OpWork, device: str, seed: int) -> Call:
    draw = Draw(seed, device, in_place=device == "cuda")
    return at_load(work.op, work.case, work.load, draw)


def _measure_one(
    work: OpWork, sides: Mapping[str, Side | str], watch: Stopwatch, rounds: int
) -> OpResult:
    result = OpResult(work, OPS[work.op].cost(work.case, work.load))
    calls = draw_calls(work, watch.device)
    series: dict[str, tuple[list[Timed], float]] = {}
    first: list[torch.Tensor] | None = None
    for name, side in sides.items():
        if isinstance(side, str):
            result.missing[name] = side
            continue
        try:
            returned = tensors(side(work.case, _draw(work, watch.device, 0))())
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
