"""Ahead of the first request: the steps that start all kernels of a plan, whose code is compiled
beforehand by several processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from metainfer.arch.record import Arch
from metainfer.core.units import format_seconds
from metainfer.kernels.tuned import Tuned
from metainfer.llm.made_steps import Room
from metainfer.llm.step import Step
from metainfer.ops.base import Target
from metainfer.ops.kernel_order import COMPOSED, REFERENCE
from metainfer.plan.plan import Plan

if TYPE_CHECKING:
    from metainfer.kernels.triton.launch import Launcher

_MOST_WORKERS = 16
_LONG_S = 2.0
"""What takes longer tells how far it is."""

_log = logging.getLogger(__name__)


def steps_ahead(
    arch: Arch, plan: Plan, target: Target, launch: Launcher | None, tuned: Tuned
) -> list[Step]:
    """Steps that start every kernel of the plan, whatever the load will be. Their code is on disk
    afterwards, as far as it compiles. None where kernels are not compiled, or read on the host."""
    slow = any(name in plan.kernel_order.value for name in (COMPOSED, REFERENCE))
    if launch is None or launch.interpreted or slow or target.type != "cuda":
        return []
    # They need Triton, which is not everywhere.
    from metainfer.kernels.triton.ahead import Form, compile_ahead, missing_units
    from metainfer.llm.paper import Paper, covering_steps

    began_s = time.perf_counter()
    try:
        paper = Paper(arch, plan, target, launch.multiprocessors, tuned, portable=launch.portable)
        steps, units = covering_steps(Room.of(plan), paper.of_step, paper.borders)
        units |= paper.of_shapes() | paper.of_draws()
    except Exception:
        # A backend that others brought may not run without numbers; sizes are guessed then.
        _log.warning("what the plan compiles could not be found beforehand", exc_info=True)
        return []
    form = Form(launch.capability, launch.portable)
    missing = missing_units(units, form)
    found_s = time.perf_counter() - began_s
    _log.info(
        "the plan takes %d pieces of machine code, of which %d are to be compiled (found in %s)",
        len(units),
        len(missing),
        format_seconds(found_s),
    )
    workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    compile_ahead(missing, form, workers, _teller())
    return steps


def _teller() -> Callable[[int, int], None]:
    """Says every few seconds how far it is."""
    began_s = said_s = time.perf_counter()

    def tell(done: int, total: int) -> None:
        nonlocal said_s
        now_s = time.perf_counter()
        if now_s - said_s > _LONG_S or (done == total and now_s - began_s > _LONG_S):
            said_s = now_s
            _log.info(
                "compiled %d of %d kernels in %s", done, total, format_seconds(now_s - began_s)
            )

    return tell
