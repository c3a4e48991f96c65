"""Work in threads: all of it is done, failures come out, and Ctrl-C at any moment ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count

import pytest

from metainfer.core.threads import in_threads
from tests.fakes.interrupts import interrupted_at


@pytest.mark.parametrize("workers", [1, 3, 9])
def test_every_task_is_done_once(workers: int) -> None:
    done: list[int] = []
    in_threads([lambda n=n: done.append(n) for n in range(50)], workers)  # type: ignore[misc]
    assert sorted(done) == list(range(50))


def test_the_first_failure_stops_the_others() -> None:
    stopped = threading.Event()
    late: list[int] = []

    def fail() -> None:
        raise ValueError("it failed")

    tasks = [lambda: stopped.wait(60), fail, *[lambda: late.append(1)] * 100]
    with pytest.raises(ValueError, match="it failed"):
        in_threads(tasks, 1 + 1, stopped.set)
    assert late == [], "nothing is begun behind a failure"


def test_ctrl_c_at_any_moment_ends_it() -> None:
    before = threading.active_count()
    for number in count(1):
        stopped: list[bool] = []

        def task(stopped: list[bool] = stopped) -> None:
            until_s = time.monotonic() + 0.003
            while not stopped and time.monotonic() < until_s:
                time.sleep(0.0005)

        def run(stopped: list[bool] = stopped, task: Callable[[], None] = task) -> None:
            in_threads([task] * 4, 2, lambda: stopped.append(True))

        try:
            if not interrupted_at(number, run):
                break
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail(f"SIGINT at event {number} was lost")
        assert threading.active_count() == before, number
    assert number > 50
