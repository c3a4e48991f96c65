"""Where the time of a step goes: each bound kernel is timed while whole steps run, one by one.

Kernels start one after the other from Python (no graphs, nothing side by side), so that each has a
time of its own. On a GPU the device is held back until the host has queued the step: what is told
is the device's time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from metainfer.arch.cache_kinds import blocks_for
from metainfer.bench.profile_settings import ProfileLoad
from metainfer.bench.traffic import draw_ids
from metainfer.kernels.compare import tensors
from metainfer.kernels.registry import Kernel
from metainfer.llm.engine import LoadedModel
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.step import SequenceStep, Step, StepKind
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS

_HELD_CYCLES_PER_S = 2.0e9
_LONGEST_HELD_S = 0.2
_BY_STEP = "attention.compress"
"""Operations that are given rings, not the step's rows; others begin with what has their rows."""


@dataclass(frozen=True, slots=True)
class Called:
    """What ran: an operation at a case on so many rows, by which backend."""

    op: str
    case: Any
    backend: str
    rows: int | None  # None: those of the step


@dataclass(slots=True)
class Meter:
    """A watcher that times calls of kernels while it is on. `device`: "cpu" or "cuda"."""

    device: str
    on: bool = False
    _times: list[tuple[Called, Any, Any]] = field(default_factory=list)

    def run(self, kernel: Kernel, *arguments: Any) -> Any:
        """Run a kernel, noting when it began and ended."""
        if not self.on:
            return kernel.run(*arguments)
        rows = None if kernel.op.startswith(_BY_STEP) else _rows(kernel.op, arguments)
        began = self._now()
        result = kernel.run(*arguments)
        called = Called(kernel.op, kernel.case, kernel.backend, rows)
        self._times.append((called, began, self._now()))
        return result

    def take(self) -> dict[Called, tuple[int, float]]:
        """(calls, seconds) of each since the last time."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        found: dict[Called, tuple[int, float]] = {}
        for called, began, ended in self._times:
            calls, seconds = found.get(called, (0, 0.0))
            took = began.elapsed_time(ended) / 1e3 if self.device == "cuda" else ended - began
            found[called] = calls + 1, seconds + took
        self._times.clear()
        return found

    def _now(self) -> Any:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class OpTime:
    """One line of a profile. `seconds`: one value per repeat, of all calls of a step together."""

    called: Called
    calls: int
    load: Load
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Profile:
    """One step.

    Attributes:
        phase: "prefill" or "decode".
        rows, tokens: of the step, and of the sequences up to its last row.
        ops: those that took the longest first.
        step_s: what the whole step took, its meter off, as the host sees it; one per repeat.
    """

    phase: str
    rows: int
    tokens: int
    ops: tuple[OpTime, ...]
    step_s: tuple[float, ...]


def profiles(
    loaded: LoadedModel, meter: Meter, load: ProfileLoad, on_step: Callable[[str], None]
) -> list[Profile]:
    """A prefill of `load.prefill_tokens`, then decode steps."""
    plan, arch = loaded.plan, loaded.arch
    generator = random.Random(0)
    prompt = draw_ids(generator, max(load.prefill_tokens, load.decode_context), arch.vocab_size)
    most = plan.max_num_batched_tokens.value
    found = []
    on_step(f"prefill of {load.prefill_tokens} tokens")
    *before, last = _chunks(prompt[: load.prefill_tokens], most, plan.block_tokens)
    for step in before:
        loaded.runner.dry_run(step)
    tokens = load.prefill_tokens
    found.append(_profile(loaded, meter, load, "prefill", last, tokens))
    for step in _chunks(prompt[: load.decode_context], most, plan.block_tokens):
        loaded.runner.dry_run(step)
    for batch in load.decode_batches:
        on_step(f"decode of {batch} at {load.decode_context} tokens")
        ids = draw_ids(generator, batch, arch.vocab_size)
        step = _decode(ids, load.decode_context, plan.block_tokens)
        found.append(_profile(loaded, meter, load, "decode", step, load.decode_context + 1))
    return found


def _profile(
    loaded: LoadedModel, meter: Meter, load: ProfileLoad, phase: str, step: Step, tokens: int
) -> Profile:
    run = partial(loaded.runner.dry_run, step)
    run()  # whatever is done once
    queued_s = _timed(run, meter.device)
    step_s, metered = [], []
    for _ in range(load.repeats):
        step_s.append(_timed(run, meter.device))
        meter.on = True
        if meter.device == "cuda":
            held_s = min(2.0 * queued_s, _LONGEST_HELD_S)
            torch.cuda._sleep(int(held_s * _HELD_CYCLES_PER_S))
        run()
        meter.on = False
        metered.append(meter.take())
    ops = []
    for called, (calls, _) in metered[0].items():
        rows = step.num_rows if called.rows is None else called.rows
        seconds = tuple(found.get(called, (0, 0.0))[1] for found in metered)
        ops.append(OpTime(called, calls, Load(rows, tokens), seconds))
    ops.sort(key=lambda one: -one.median_s)
    return Profile(phase, step.num_rows, tokens, tuple(ops), tuple(step_s))


def _timed(run: Callable[[], Any], device: str) -> float:
    """Seconds until what was started is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def _rows(op: str, arguments: tuple[Any, ...]) -> int | None:
    """Rows of the first tensor that is no weight."""
    given = tensors(arguments[1:] if OPS[op].weights else arguments)
    return len(given[0]) if given else None


def _chunks(prompt: list[int], most: int, block_tokens: int) -> list[Step]:
    """The steps of a prefill in slot 0; the first clears it."""
    starts = range(0, len(prompt), most)
    return [
        _step([_part(0, start, prompt[start : start + most], start == 0, block_tokens)], 0)
        for start in starts
    ]


def _decode(ids: list[int], context: int, block_tokens: int) -> Step:
    """A row of each of so many sequences, which share the blocks of slot 0."""
    parts = [
        _part(slot, context, [token], slot > 0, block_tokens) for slot, token in enumerate(ids)
    ]
    return _step(parts, len(parts))


def _part(slot: int, start: int, ids: list[int], resets: bool, block_tokens: int) -> SequenceStep:
    return SequenceStep(
        request_id=f"profile {slot}",
        state_slot=slot,
        blocks=tuple(range(blocks_for(start + len(ids), block_tokens))),
        start=start,
        token_ids=tuple(ids),
        sample_rows=1,
        resets_state=resets,
    )


def _step(parts: Iterable[SequenceStep], decoding: int) -> Step:
    sequences = tuple(parts)
    sampling = SamplingParams(temperature=0.0)
    requests = tuple(Request(part.request_id, (0,), sampling, 0.0) for part in sequences)
    kind = StepKind.DECODE if decoding else StepKind.PREFILL
    return Step(0, kind, sequences, decoding, admitted=requests)
