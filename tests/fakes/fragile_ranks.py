"""Bodies of the processes of ranks that fail in one way or another (`llm.rank_worker.work`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from metainfer.llm import rank_worker
from metainfer.llm.runner import Runner
from metainfer.llm.step import Step
from metainfer.models.deepseek_v4 import DeepseekV4

BAD = 13
"""A request with this top_k fails where it is asked to."""

_launch, _logits = Runner.launch, DeepseekV4.logits


def is_bad(step: Step) -> bool:
    return any(request.sampling.top_k == BAD for request in step.admitted)


def refusing(runner: Runner, step: Step) -> Any:
    """Fails before anything is computed."""
    if is_bad(step):
        raise ValueError("a bad step")
    return _launch(runner, step)


def no_logits(model: DeepseekV4, streams_RSD: torch.Tensor) -> torch.Tensor:
    raise ValueError("no logits")


def launch_without_logits(runner: Runner, step: Step) -> Any:
    """Fails behind the last layer, when all other ranks wait to gather logits."""
    if not is_bad(step):
        return _launch(runner, step)
    DeepseekV4.logits = no_logits
    try:
        return _launch(runner, step)
    finally:
        DeepseekV4.logits = _logits


def drawing_otherwise(runner: Runner, step: Step) -> Any:
    """Draws of bad steps get another seed than on rank 0."""
    flight = _launch(runner, step)
    if is_bad(step):
        wait = flight.wait

        def other() -> Any:
            output = wait()
            first = output.sequences[0]
            object.__setattr__(first, "token_ids", tuple(t ^ 1 for t in first.token_ids))
            return output

        flight.wait = other
    return flight


NOTES = "FRAGILE_RANKS_NOTES"
"""The environment names a directory."""


def noting(runner: Runner, step: Step) -> Any:
    """Leaves a file for each step that it begins."""
    (Path(os.environ[NOTES]) / str(step.step_id)).touch()
    return _launch(runner, step)


def _with(launch: Callable[[Runner, Step], Any]) -> Callable[[Connection, Connection], None]:
    def body(connection: Connection, life: Connection) -> None:
        Runner.launch = launch
        rank_worker.work(connection, life)

    return body


def refuses(connection: Connection, life: Connection) -> None:
    _with(refusing)(connection, life)


def has_no_logits(connection: Connection, life: Connection) -> None:
    _with(launch_without_logits)(connection, life)


def draws_otherwise(connection: Connection, life: Connection) -> None:
    _with(drawing_otherwise)(connection, life)


def notes_steps(connection: Connection, life: Connection) -> None:
    _with(noting)(connection, life)


def exits_while_it_loads(connection: Connection, life: Connection) -> None:
    connection.recv_bytes()
    os._exit(3)


def cannot_load(connection: Connection, life: Connection) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("not enough of it")

    rank_worker.make_runner = out_of_memory
    rank_worker.work(connection, life)


def never_answers(connection: Connection, life: Connection) -> None:
    time.sleep(3600)
