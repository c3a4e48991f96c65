"""Virtual ranks: threads of one process that form a group, for tests and trials of layouts.

They compute what ranks in processes of their own compute, bit for bit. On a GPU they share the
device and its current stream, on which the order of work is the order in which threads queue it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from metainfer.comm.group import (
    DEADLINE_S,
    Aborted,
    Group,
    GroupError,
    Stalled,
    check_part,
    share_rows,
    sum_in_order,
)
from metainfer.comm.wire import Plain, Wire, wire_of
from metainfer.plan.routes import DECODE, PREFILL
from metainfer.plan.wires import PLAIN

T = TypeVar("T")
_END_S = 5.0  # for threads to see that others failed


class _World:
    """What all threads share: one lock, and the error that ended them.

    Attributes:
        changed: held while anything here is read or written.
        failed: (rank, its error) of the first rank that failed.
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.failed: tuple[int, BaseException] | None = None
        self._boards: dict[Any, _Board] = {}
        self.mail: dict[tuple[Any, int, int], deque[torch.Tensor]] = {}
        self.size = size

    def board(self, key: Any, size: int) -> _Board:
        """The one of a group."""
        with self.changed:
            return self._boards.setdefault(key, _Board(size))

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            self.failed = self.failed or (rank, error)
            self.changed.notify_all()


class _Board:
    """Where the ranks of a group lay down what others read.

    Attributes:
        begun, done: operations that each rank laid something down for, and has ended.
        values: of the current operation, by rank.
        calls: what each rank called it.
    """

    def __init__(self, size: int) -> None:
        self.begun = [0] * size
        self.done = [0] * size
        self.values: list[Any] = [None] * size
        self.calls: list[str] = [""] * size


class VirtualGroup:
    """See `virtual_groups`."""

    def __init__(self, world: _World, members: Sequence[int], rank: int, key: Any,
                 deadline_s: float, wire: str) -> None:  # fmt: skip
        """`members`: ranks of the world, of which this is `members[rank]`."""
        self.rank = rank
        self.wire = wire
        self.size = len(members)
        self._world, self._members, self._key = world, tuple(members), key
        self._deadline_s = deadline_s
        self._board = world.board(key, self.size)
        self._number = 0
        self._parts = 0

    def all_reduce(self, partial: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        wire = wire_of(self.wire if phase == PREFILL else PLAIN, partial)
        return self._exchange(
            _call("all_reduce", partial), partial, lambda found: _sum(found, wire, returns=True)
        )

    def all_gather(self, part_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        return self._exchange(_call("all_gather", part_N), part_N, torch.cat)

    def reduce_scatter(self, partial_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        rows = share_rows(len(partial_N), self.size)
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        wire = wire_of(self.wire if phase == PREFILL else PLAIN, partial_N)
        return self._exchange(
            _call("reduce_scatter", partial_N),
            partial_N,
            lambda found: _sum([part[own] for part in found], wire, returns=False),
        )

    def all_to_all(self, parts_N: torch.Tensor, phase: str = DECODE) -> torch.Tensor:
        rows = share_rows(len(parts_N), self.size)
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        return self._exchange(
            _call("all_to_all", parts_N),
            parts_N,
            lambda found: torch.cat([parts[own] for parts in found]),
        )

    def gather(self, value: T) -> list[T] | None:
        found: list[T] = self._exchange("gather", value, list)
        return found if self.rank == 0 else None

    def broadcast(self, value: T) -> T:
        first: T = self._exchange("broadcast", value, lambda found: found[0])
        return first

    def send(self, tensor: torch.Tensor, to: int) -> None:
        copied = tensor.clone()
        with self._world.changed:
            self._check()
            self._mail(self.rank, to).append(copied)
            self._world.changed.notify_all()

    def receive(self, like: torch.Tensor, sender: int) -> torch.Tensor:
        with self._world.changed:
            mail = self._mail(sender, self.rank)
            self._wait(lambda: bool(mail), _call("receive", like), lambda: [sender])
            found = mail.popleft()
        if found.shape != like.shape or found.dtype != like.dtype:
            raise GroupError(
                f"rank {self._members[self.rank]} waited for {_call('receive', like)} and got"
                f" {_call('send', found)} from rank {self._members[sender]}"
            )
        return found

    def part(self, ranks: Sequence[int]) -> VirtualGroup:
        rank = check_part(ranks, self)
        self._parts += 1
        members = [self._members[member] for member in ranks]
        key = (self._key, self._parts, tuple(members))
        return VirtualGroup(self._world, members, rank, key, self._deadline_s, self.wire)

    def abort(self, why: str) -> None:
        """End what all ranks wait for, whichever group they wait in."""
        self._world.fail(self._members[self.rank], GroupError(why))

    def close(self) -> None:
        return None

    def _exchange(self, call: str, value: Any, read: Callable[[list[Any]], T]) -> T:
        """What `read` makes of all ranks' values, of which none changes until all have read."""
        board, changed = self._board, self._world.changed
        self._number += 1
        number = self._number
        with changed:
            self._check()
            board.values[self.rank], board.calls[self.rank] = value, call
            board.begun[self.rank] = number
            changed.notify_all()
            self._wait_for_all(board.begun, number, call)
            self._check_calls(call)
        result = read(board.values)
        with changed:
            board.done[self.rank] = number
            changed.notify_all()
            self._wait_for_all(board.done, number, call)
        return result

    def _wait_for_all(self, counters: list[int], number: int, call: str) -> None:
        def late() -> list[int]:
            return [rank for rank, count in enumerate(counters) if count < number]

        self._wait(lambda: min(counters) >= number, call, late)

    def _wait(
        self, ready: Callable[[], bool], call: str, late: Callable[[], Sequence[int]]
    ) -> None:
        until_s = time.monotonic() + self._deadline_s
        while not ready():
            self._check()
            if not self._world.changed.wait(until_s - time.monotonic()) and not ready():
                names = ", ".join(str(self._members[rank]) for rank in late())
                raise Stalled(
                    f"rank {self._members[self.rank]} waited {self._deadline_s:g} s in {call} for"
                    f" rank {names}"
                )

    def _check(self) -> None:
        if self._world.failed:
            rank, error = self._world.failed
            raise Aborted(f"rank {rank} failed: {error}") from error

    def _check_calls(self, call: str) -> None:
        for rank, other in enumerate(self._board.calls):
            if other != call:
                raise GroupError(
                    f"rank {self._members[self.rank]} is in {call}, rank {self._members[rank]} in"
                    f" {other}"
                )

    def _mail(self, sender: int, to: int) -> deque[torch.Tensor]:
        return self._world.mail.setdefault((self._key, sender, to), deque())


def _call(operation: str, tensor: torch.Tensor) -> str:
    return f"{operation} of {tensor.dtype} {list(tensor.shape)}".replace("torch.", "")


def _sum(parts: Sequence[torch.Tensor], wire: Wire, *, returns: bool) -> torch.Tensor:
    """Of what arrives of each part; `returns`: the sum travels too."""
    if isinstance(wire, Plain):
        return sum_in_order(parts)
    total = sum_in_order([_arrived(part, wire) for part in parts])
    if returns:
        total = _arrived(total, wire)
    return total.to(parts[0].dtype).view(parts[0].shape)


def _arrived(tensor: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Flat, as `wire` decodes it."""
    return wire.decode(wire.encode(tensor.contiguous().view(-1)))


def virtual_groups(
    size: int, deadline_s: float = DEADLINE_S, wire: str = PLAIN
) -> list[VirtualGroup]:
    """The groups of `size` ranks, each for one thread; see `run_ranks`."""
    world = _World(size)
    return [VirtualGroup(world, range(size), rank, (), deadline_s, wire) for rank in range(size)]


def run_ranks(groups: Sequence[VirtualGroup], body: Callable[[Group], T]) -> list[T]:
    """What `body` returns for each group, called in threads of their own at the same time.

    Raises what the first rank that failed raised; all others end with it.
    """
    world = groups[0]._world
    results: list[Any] = [None] * len(groups)
    inference = torch.is_inference_mode_enabled()
    gradients = torch.is_grad_enabled()

    def run(place: int) -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                results[place] = body(groups[place])
        except BaseException as error:
            world.fail(groups[place].rank, error)

    threads = [
        threading.Thread(target=run, args=(place,), name=f"rank {group.rank}", daemon=True)
        for place, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not world.failed:
            thread.join(0.05)
    for thread in threads:
        thread.join(_END_S if world.failed else None)
    if world.failed:
        raise world.failed[1]
    return results
