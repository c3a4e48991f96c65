"""Warm-up: dry runs before the first request: of the largest steps, and on a GPU of all sizes.

They put the plan's memory to the test while nobody waits, and let kernels and allocators settle. A
kernel for a GPU is compiled for each class of rows that it treats in a way of its own; those lie
between powers of two, and numbers that 16 divides may have one to themselves.
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

_LONG_CONTEXT = 8192
"""Tokens of a sequence whose entries are scored and chosen, for all models."""

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
    seqs = min(plan.max_num_seqs.value, plan.max_num_batched_tokens.value)
    if plan.cuda_graph_sizes.value:
        # On a GPU few rows take as long as hundreds: what many take is seen from step to step.
        _run_all_sizes(runner, rows, min(length, _LONG_CONTEXT), seqs)
    elif first_s * rows / first > _LONGEST_S:
        _log.info("no dry run: %d rows took %s", first, format_seconds(first_s))
        return
    _timed(runner, _step([_decode(slot, length) for slot in range(seqs)], seqs))
    largest_s = _timed(runner, _step([_prefill(length=length, rows=rows)], 0))
    _log.info("dry run: a step of %d rows took %s", rows, format_seconds(largest_s))


def _run_all_sizes(runner: Runner[Any], most: int, length: int, seqs: int) -> None:
    """Prefills of every class of rows, at the start of a sequence and far behind it, alone and
    beside rows that decode."""
    began_s = time.perf_counter()
    sizes = row_classes(min(most, length))
    for rows in sizes:
        runner.dry_run(_step([_prefill(length=rows, rows=rows)], 0))
        runner.dry_run(_step([_prefill(length=length, rows=rows)], 0))
        decoding = min(seqs - 1, most - rows)
        if rows > 1 and decoding > 0:
            parts = [_decode(slot, length) for slot in range(1, 1 + decoding)]
            runner.dry_run(_step([*parts, _prefill(length=length, rows=rows)], decoding))
    _log.info(
        "prefills of %d sizes were run in %s",
        len(sizes),
        format_seconds(time.perf_counter() - began_s),
    )


def row_classes(most: int) -> list[int]:
    """Numbers of rows that a GPU's kernels may treat differently: powers of two, the numbers before
    them, and the largest."""
    sizes = {most, max(1, most - 1)}
    size = 1
    while size < most:
        sizes |= {size, max(1, size - 1)}
        size *= 2
    return sorted(sizes)


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
