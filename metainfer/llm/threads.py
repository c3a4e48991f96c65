"""Threads that compute: what each must know before it starts, and work in one that ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import torch

from metainfer.kernels.gpu.current import use_device
from metainfer.plan.plan import Plan

_Made = TypeVar("_Made")


def settle_thread(plan: Plan, cpus: Sequence[int] = ()) -> None:
    """What the calling thread must know: which GPU is its own, and how many threads compute with
    it. torch counts them per process, OpenMP per calling thread: both are told.

    Args:
        cpus: that it is bound to, and the threads that it starts; none for all.
    """
    use_device(plan.device.value)
    if cpus:
        with suppress(OSError):  # where the system grants fewer
            os.sched_setaffinity(0, cpus)
    if plan.threads.value:
        torch.set_num_threads(plan.threads.value)


def in_a_thread(plan: Plan, work: Callable[[], _Made], cpus: Sequence[int] = ()) -> _Made:
    """What `work` returns or raises, done in a thread that ends, on the device of `plan`.

    OpenMP keeps workers for every thread that ever computed. Where they are more than the cores,
    none of them waits actively, and steps of the engine's own thread take up to twice as long.
    """
    return begun(lambda: _settled(plan, work, cpus)).result()  # Ctrl-C ends the wait


def begun(work: Callable[[], _Made]) -> Future[_Made]:
    """What `work` will return or raise, done beside the caller in a thread that ends; it ends with
    the process."""
    done: Future[_Made] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return done


class InOrder:
    """Does what it is given in a thread of its own, one after the other, as long as the process
    lives.

    Args:
        settle: done first of all.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._given: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._given.put(settle)
        threading.Thread(target=self._run, name="own part", daemon=True).start()

    def begin(self, work: Callable[[], _Made]) -> Future[_Made]:
        """What `work` will return or raise."""
        done: Future[_Made] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._given.put(run)
        return done

    def _run(self) -> None:
        while True:
            self._given.get()()


def _settled(plan: Plan, work: Callable[[], _Made], cpus: Sequence[int]) -> _Made:
    settle_thread(plan, cpus)
    return work()
