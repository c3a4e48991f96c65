"""Warm-up: dry runs of the largest steps before the first request.

They put the plan's memory to the test while nobody waits, and let kernels and allocators settle.
The steps are made up: what they write into slots and blocks is cleared or overwritten by requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from metainfer.arch.cache_kinds import BLOCK_TOKENS, blocks_for
from metainfer.core.units import format_seconds
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.runner import Runner
from metainfer.llm.step import SequenceStep, Step, StepKind
from metainfer.plan.plan import Plan

_FIRST_ROWS = 32
_LONGEST_S = 4.0
"""A prefill that would take longer is left out: start-up should not be slower than a request."""

_log = logging.getLogger(__name__)


def warm_up(runner: Runner[Any], plan: Plan) -> None:
    """Run a short prefill and, where they are cheap, the largest decode and the largest prefill;
    capture the graphs of decode steps.

    Raises what the model raises, running out of memory among it.
    """
    length = min(plan.max_model_len.value, plan.num_blocks.value * BLOCK_TOKENS) - 1
    rows = min(plan.max_num_batched_tokens.value, length)
    first = min(_FIRST_ROWS, rows)
    short = _step([_prefill(length=first, rows=first)], 0)
    _timed(runner, short)  # whatever is done once is done now
    first_s = _timed(runner, short)
    runner.capture()
    if first_s * rows / first > _LONGEST_S:
        _log.info("no dry run: %d rows took %s", first, format_seconds(first_s))
        return
    seqs = min(plan.max_num_seqs.value, plan.max_num_batched_tokens.value)
    _timed(runner, _step([_decode(slot, length) for slot in range(seqs)], seqs))
    largest_s = _timed(runner, _step([_prefill(length=length, rows=rows)], 0))
    _log.info("dry run: a step of %d rows took %s", rows, format_seconds(largest_s))


def _timed(runner: Runner[Any], step: Step) -> float:
    """Seconds that `step` took."""
    began_s = time.perf_counter()
    runner.dry_run(step)
    return time.perf_counter() - began_s


def _prefill(length: int, rows: int) -> SequenceStep:
    """The last `rows` of a sequence of `length` tokens, in slot 0."""
    return _part(0, length - rows, rows)


def _decode(slot: int, length: int) -> SequenceStep:
    """The last row of a sequence of `length` tokens. All share the same blocks."""
    return _part(slot, length - 1, 1)


def _part(slot: int, start: int, rows: int) -> SequenceStep:
    return SequenceStep(
        request_id=f"warm-up {slot}",
        state_slot=slot,
        blocks=tuple(range(blocks_for(start + rows))),
        start=start,
        token_ids=(0,) * rows,
        sample_rows=1,
        resets_state=True,
    )


def _step(parts: Iterable[SequenceStep], num_decode_sequences: int) -> Step:
    sequences = tuple(parts)
    kind = StepKind.DECODE if num_decode_sequences else StepKind.PREFILL
    # Drawn at random: greedy rows take less.
    sampling = SamplingParams(top_p=0.9, seed=0)
    requests = tuple(Request(part.request_id, (0,), sampling, 0.0) for part in sequences)
    return Step(0, kind, sequences, num_decode_sequences, admitted=requests)
