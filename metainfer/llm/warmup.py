"""Warm-up: dry runs before the first request: of the largest steps, and on a GPU of all kinds.

They put the plan's memory to the test while nobody waits, and let kernels, libraries and allocators
settle. On a GPU a kernel is compiled and loaded for each class of rows that it treats in a way of
its own: steps that meet all of them are found on paper (`llm.ahead`). Libraries have classes that
nobody knows; sizes at and below powers of two make them load most of what they have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from metainfer.core.units import format_seconds
from metainfer.llm.made_steps import Room, decode, prefill
from metainfer.llm.step import Step
from metainfer.plan.plan import Plan

_FIRST_ROWS = 32
_LONGEST_S = 4.0
"""A prefill that would take longer is left out: start-up should not be slower than a request."""

_LONG_CONTEXT = 8192
"""Tokens of a sequence whose entries are scored and chosen, for all models."""

_log = logging.getLogger(__name__)


class DryRunner(Protocol):
    """What this needs of `llm.runner.Runner`."""

    def dry_run(self, step: Step) -> None: ...

    def capture(self) -> None: ...


def warm_up(runner: DryRunner, plan: Plan, found: Sequence[Step] = ()) -> None:
    """Run a short prefill and, where they are cheap, the largest decode and the largest prefill;
    capture the graphs of decode steps.

    Args:
        found: steps that start all kernels.

    Raises what the model raises, running out of memory among it.
    """
    room = Room.of(plan)
    first = min(_FIRST_ROWS, room.rows)
    short = room.step([prefill(first, first)])
    _timed(runner, short)  # whatever is done once is done now
    first_s = _timed(runner, short)
    runner.capture()
    if plan.cuda_graph_sizes.value:
        # On a GPU few rows take as long as hundreds: what many take is seen from step to step.
        if not _run_all(runner, [*found, *sizes(room)]):
            return
    elif first_s * room.rows / first > _LONGEST_S:
        _log.info("no dry run: %d rows took %s", first, format_seconds(first_s))
        return
    decoding = [decode(slot, room.tokens) for slot in range(room.sequences)]
    _timed(runner, room.step(decoding, room.sequences))
    largest_s = _timed(runner, room.step([prefill(room.tokens, room.rows)]))
    _log.info("dry run: a step of %d rows took %s", room.rows, format_seconds(largest_s))


def _run_all(runner: DryRunner, steps: Sequence[Step]) -> bool:
    """Small ones first, until one takes too long; whether none did."""
    began_s = time.perf_counter()
    for one in sorted(steps, key=lambda one: one.num_rows):
        if _timed(runner, one) > _LONGEST_S and one.num_rows > _FIRST_ROWS:
            _log.warning("a step of %d rows took seconds; larger ones are not run", one.num_rows)
            return False
    took_s = time.perf_counter() - began_s
    _log.info("%d steps of all sizes were run in %s", len(steps), format_seconds(took_s))
    return True


def sizes(room: Room) -> list[Step]:
    """Prefills of every class of rows, at the start of a sequence and far behind it, alone and
    beside rows that decode."""
    made = []
    long = min(room.tokens, _LONG_CONTEXT)
    for rows in row_classes(min(room.rows, long)):
        made += [room.step([prefill(rows, rows)]), room.step([prefill(long, rows)])]
        decoding = min(room.sequences - 1, room.rows - rows)
        if rows > 1 and decoding > 0:
            made.append(room.mixed(long, decoding, long, rows))
    return made


def row_classes(most: int) -> list[int]:
    """Numbers of rows that a GPU's libraries may treat differently: powers of two, the numbers
    before them, and the largest."""
    found = {most, max(1, most - 1)}
    size = 1
    while size < most:
        found |= {size, max(1, size - 1)}
        size *= 2
    return sorted(found)


def _timed(runner: DryRunner, one: Step) -> float:
    """Seconds that a step took."""
    began_s = time.perf_counter()
    runner.dry_run(one)
    return time.perf_counter() - began_s
