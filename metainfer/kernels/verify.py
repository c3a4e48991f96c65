"""Verification: every operation at the shapes of a model, on the card at hand.

Each is compared with its reference, which runs on the same device in fp32: inputs are fresh random
numbers, and memory that a kernel takes is poisoned (`compare.Poisoned`). Then it is timed against
its floor. A compiled binary proves neither results nor speed; this does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from metainfer.core.errors import UserError, first_line
from metainfer.kernels.compare import Comparison, Poisoned, changed, compare, run
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.inputs.series import draw_one, draw_series
from metainfer.kernels.memory_bound import NoRoomError, is_out_of_memory
from metainfer.kernels.platform import Platform
from metainfer.kernels.timing import Stopwatch, measure_rates
from metainfer.kernels.verify_run import Check, Outcome, Sizes
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS
from metainfer.ops.floor import Rates
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.targets import parse_portable

_MOST_SERIES = 4
_TIMING_S = 0.05


def checks_of(uses: Sequence[tuple[str, Any, str]], sizes: Sizes, longest: int) -> list[Check]:
    """Checks of uses (op, case, phase) at some sizes.

    Args:
        sizes: one that changes nothing for an operation is left out.
        longest: tokens of the longest sequence.
    """
    found: dict[tuple[str, Any, Any], Check] = {}
    for op, case, phase in uses:
        for rows in (sizes.prefill_rows,) if phase == "prefill" else sizes.decode_batches:
            for count in sizes.entries:
                tokens = min(count * max(getattr(case, "ratio", 1), 1), longest)
                load = Load(min(rows, tokens) if phase == "prefill" else rows, tokens)
                cost = OPS[op].cost(case, load)
                found.setdefault((op, case, (load.rows, cost)), Check(op, case, phase, load))
    return list(found.values())


def check(on: Platform, one: Check, order: str, seed: int, cache_dtype: str = "") -> Outcome:
    """Run the backend that is chosen and compare it with the reference. A reference that the order
    chooses is not run.

    Args:
        cache_dtype: of caches that hold plain numbers; "" for that of the case.

    Raises NoRoomError where memory did not suffice; nothing else.
    """
    try:
        backend = one.backend or on.registry.bind(one.op, one.case, on.target, order).backend
    except UserError as error:
        return Outcome("", torch.inf, error.message)
    if backend == REFERENCE:
        return Outcome(backend, 0.0, "")
    try:
        found = _compared(on, one, backend, seed, cache_dtype)
    except Exception as error:  # whatever a kernel raises is what is to be reported
        outcome = Outcome(backend, torch.inf, f"{type(error).__name__}: {first_line(error)}")
        if is_out_of_memory(error):
            raise NoRoomError(outcome) from error
        return outcome
    return Outcome(backend, found.error, found.problem)


def _compared(on: Platform, one: Check, backend: str, seed: int, cache_dtype: str) -> Comparison:
    """Inputs are drawn anew rather than kept: of experts one copy takes gigabytes, and two are the
    most that are there at once."""
    draw = partial(draw_one, one.op, one.case, one.load, on.device, seed, cache_dtype)
    call = draw()
    with Poisoned():
        actual = run(on.registry, one.op, backend, one.case, call)
    fresh = draw()
    spoilt = changed(one.op, fresh, call)
    del call
    with exact_products():
        expected = run(on.registry, one.op, REFERENCE, one.case, fresh)
    del fresh
    found = compare(one.op, one.case, draw(), actual, expected)
    return Comparison(found.error, found.problem or spoilt)


@contextmanager
def exact_products() -> Iterator[None]:
    """fp32 products in fp32: not through tf32 or bf16, whatever the process allows."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def clock(on: Platform, one: Check, backend: str, seed: int, cache_dtype: str = "") -> float:
    """Median seconds of a call in a series over different inputs; `cache_dtype` as of `check`."""
    series = draw_series(one.op, one.case, one.load, on.device, seed, _MOST_SERIES, cache_dtype)
    calls = [prepared(on, one.op, backend, one.case, call) for call in series]
    while len(calls) < _MOST_SERIES:
        calls += calls
    return Stopwatch(on.device).median_s(calls, _TIMING_S)


def prepared(on: Platform, op: str, backend: str, case: Any, call: Call) -> partial[Any]:
    """A call that has only to be run: weights prepared as a layer prepares them once."""
    chosen = on.registry.candidate(op, backend)
    arguments = call.arguments
    if OPS[op].weights:
        prepare = chosen.prepare
        weights = prepare(case, *call.weights) if prepare else call.weights
        arguments = (weights, *arguments)
    return partial(chosen.run, case, *arguments)


def rates_of(on: Platform) -> Rates:
    """What the device reaches in plain work with the instructions of the target's code."""
    return rates_as(on.device, on.code_for)


def rates_as(device: str, code_for: str | None) -> Rates:
    """As `rates_of`; the device is "cpu" or "cuda", the current GPU."""
    rates = measure_rates(device)
    if code_for is None:
        return rates
    from metainfer.kernels.triton.ceiling import product_rates
    from metainfer.kernels.triton.portable import PtxLauncher

    products = product_rates(PtxLauncher(parse_portable(code_for)))
    plain = {"float32": rates.flops_per_s["float32"]}
    return Rates(rates.bytes_per_s, plain | products, rates.launch_s)
