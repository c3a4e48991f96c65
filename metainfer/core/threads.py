"""Work in threads that Ctrl-C can stop, whenever it comes.

An interrupt is raised between any two bytecodes of the main thread. Between those of a lock of
`concurrent.futures` or of a `threading.Condition` it leaves the lock taken, and a thread that needs
it waits for ever. Here the main thread takes no lock that others need.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Thread

Task = Callable[[], object]

_LOOK_S = 0.1
"""A wait ends at once as a rule: the token that an interrupt made the main thread lose is rare."""


def in_threads(tasks: Iterable[Task], workers: int, stop: Task = lambda: None) -> None:
    """Do `tasks`, each in whichever of so many threads is free next, and return when all are done.

    Args:
        stop: called in the caller's thread when a task has failed, and at Ctrl-C: tasks that run
            are to end soon. It may take no lock that they hold.

    Raises:
        BaseException: what the first task that failed raised, or what interrupted the wait. No
            thread runs any more, unless the wait for their end was interrupted as well.
    """
    crew = _Crew(tasks)
    threads: list[Thread] = []
    try:
        with signals_held():
            _start(threads, crew.work, workers)
        while len(crew.ended) < len(threads) and not crew.failures:
            crew.wait()
    finally:
        if len(crew.ended) < len(threads):
            crew.stopping = True
            stop()
        while len(crew.ended) < len(threads):
            crew.wait()
        with signals_held():  # an interrupted join forgets its thread
            while threads:
                threads.pop().join()
    for failure in crew.failures:
        raise failure


def _start(threads: list[Thread], work: Task, count: int) -> None:
    for _ in range(count):
        thread = Thread(target=work)
        thread.start()
        threads.append(thread)


class _Crew:
    """Tasks that wait, and how the threads that take them ended.

    Attributes:
        failures: what tasks raised, in order.
        ended: one entry for each thread that takes no more.
        stopping: none is to take more.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.failures: list[BaseException] = []
        self.ended: list[None] = []
        self.stopping = False
        self._news: SimpleQueue[None] = SimpleQueue()
        self._waiting: SimpleQueue[Task] = SimpleQueue()
        for task in tasks:
            self._waiting.put(task)

    def work(self) -> None:
        """The body of a thread."""
        try:
            with suppress(Empty):
                while not (self.stopping or self.failures):
                    self._waiting.get_nowait()()
        except BaseException as error:
            self.failures.append(error)
        self.ended.append(None)
        self._news.put(None)

    def wait(self) -> None:
        """Until a thread ends, or a moment."""
        with suppress(Empty):
            self._news.get(timeout=_LOOK_S)


@contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait. Threads that start inside never get them: the main one does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
