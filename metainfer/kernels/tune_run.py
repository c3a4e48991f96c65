"""A run of tuning: pieces of work in processes of their own, findings as they come, agreed over
ranks.

A candidate that crashes its process, or hangs, is bad; another process goes on behind it. On a GPU
several processes check at once, since most of a check is compiling; what passed is timed behind
them, with nothing beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from metainfer.kernels.memory_bound import NoRoomError, bound_memory
from metainfer.kernels.processes import Numbered, in_processes, require_a_sound_device
from metainfer.kernels.tune import Bench, TimedRows, Work, settle
from metainfer.kernels.tuned import Key, key_of

T = TypeVar("T")
_LONGEST_PIECE_S = 600.0


class Ranks(Protocol):
    """As of `comm.group.Group`."""

    @property
    def size(self) -> int: ...

    def gather(self, value: T) -> list[T] | None: ...

    def broadcast(self, value: T) -> T: ...


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker runs on; see `platform.platform`.

    Attributes:
        cache_dtype: of caches that hold plain numbers.
        threads: of a step on a CPU; 0 for as many as torch takes.
    """

    device: str | None
    seed: int
    cache_dtype: str
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that check at once.

    Attributes:
        memory_bytes: of the device, that all may take together; each has its share, and a check
            that needs more is made alone when the others are done. None: no bound.
    """

    count: int = 1
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one operation at one case.

    Attributes:
        sizes: times, by rising numbers of rows; () where none passed.
        bad: (candidate, what was wrong).
    """

    op: str
    case: Any
    sizes: tuple[TimedRows, ...]
    bad: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A check of one candidate, or, where that is "", the times of all that passed."""

    work: Work
    candidate: str


def tune(
    place: Place,
    works: Sequence[Work],
    ranks: Ranks,
    on_findings: Callable[[Sequence[Finding]], None],
    on_progress: Callable[[int, int], None],
    budget_s: float | None = None,
    workers: Workers = Workers(),
) -> int:
    """Check and time the candidates of all works, which are the same on every rank.

    Args:
        on_findings: told what all ranks agreed on: after each work where there is one rank, else
            at the end.
        budget_s: no piece is begun after it; several workers check for half of it at most.

    Returns how many works the time did not reach.
    """
    until_s = None if budget_s is None else time.monotonic() + budget_s
    pieces: list[Numbered] = list(enumerate(_pieces(works)))
    found: list[Finding] = []
    left = dict(pieces)

    def told(number: int, result: Any) -> None:
        if result is None:  # it has room when it is alone
            return
        piece: _Piece = left.pop(number)
        on_progress(len(pieces) - len(left), len(pieces))
        work = piece.work
        if piece.candidate:
            if result:
                work.bad[piece.candidate] = result
            return
        sizes = () if isinstance(result, str) else result
        finding = Finding(work.op, work.case, sizes, tuple(work.bad.items()))
        found.append(finding)
        if ranks.size == 1:
            on_findings(agreed(ranks, [finding]))

    if workers.count > 1:
        checked_s = None if budget_s is None else time.monotonic() + budget_s / 2
        shares = _shares(pieces, workers.count)
        share_bytes = (
            None if workers.memory_bytes is None else workers.memory_bytes // workers.count
        )
        common = (place, share_bytes, True)
        in_processes(_work, common, shares, told, told, checked_s, _LONGEST_PIECE_S)
    common = (place, workers.memory_bytes, False)
    in_processes(_work, common, [list(left.items())], told, told, until_s, _LONGEST_PIECE_S)
    if ranks.size > 1:
        on_findings(agreed(ranks, found))
    return len(works) - len(found)


def _pieces(works: Iterable[Work]) -> Iterable[_Piece]:
    for work in works:
        for candidate in (*work.candidates, ""):
            yield _Piece(work, candidate)


def _shares(pieces: Iterable[Numbered], count: int) -> list[list[Numbered]]:
    """The checks; those of one work, which are held against the same results, in one share."""
    shares: list[list[Numbered]] = [[] for _ in range(count)]
    place = 0
    for numbered in pieces:
        if numbered[1].candidate:
            shares[place % count].append(numbered)
        else:
            place += 1
    return shares


def _work(
    connection: Connection, common: tuple[Place, int | None, bool], pieces: Sequence[Numbered]
) -> None:
    """Sends the result of each piece, or None of a check for which a share of the memory did not
    suffice.

    Args:
        common: (where, bytes that this process may take, whether others take theirs meanwhile).
    """
    from metainfer.kernels.platform import platform

    place, most_bytes, shared = common
    on = platform(place.device)
    settle(on.device, place.threads)
    if most_bytes is not None:
        bound_memory(on.device, most_bytes)
    bench = Bench(on, place.seed, place.cache_dtype)
    for number, piece in pieces:
        connection.send((number, _done(bench, piece, shared)))
        require_a_sound_device(on.device)


def _done(bench: Bench, piece: _Piece, shared: bool) -> Any:
    """The problem of a candidate, the times of all, or why there are none."""
    work = piece.work
    if piece.candidate:
        try:
            problem = bench.problem(work, piece.candidate)
        except NoRoomError as error:
            if shared:
                return None
            problem = error.outcome
        if problem:
            # Pieces of a work share it in this process too.
            work.bad[piece.candidate] = problem
        return problem
    try:
        return bench.times(work)
    except RuntimeError as error:
        return str(error).splitlines()[0][:200]


def agreed(ranks: Ranks, found: Sequence[Finding]) -> list[Finding]:
    """What holds for all ranks: a candidate is bad where any rank says so, and takes as long as on
    the slowest. Rank 0 decides. Times that any rank lacks are no times."""
    of_ranks = ranks.gather(list(found))
    merged = [] if of_ranks is None else _merged(of_ranks)
    return ranks.broadcast(merged)


def _merged(of_ranks: Sequence[Sequence[Finding]]) -> list[Finding]:
    by_key: dict[Key, list[Finding]] = {}
    for found in of_ranks:
        for one in found:
            by_key.setdefault(key_of(one.op, one.case), []).append(one)
    merged = []
    for alike in by_key.values():
        bad = {name: why for one in reversed(alike) for name, why in one.bad}
        sizes = _slowest([one.sizes for one in alike]) if len(alike) == len(of_ranks) else ()
        if sizes or bad:
            merged.append(Finding(alike[0].op, alike[0].case, sizes, tuple(bad.items())))
    return merged


def _slowest(of_ranks: Sequence[Sequence[TimedRows]]) -> tuple[TimedRows, ...]:
    found = []
    for first in of_ranks[0]:
        same = [one for sizes in of_ranks for one in sizes if one.rows == first.rows]
        names = [name for name in first.seconds if all(name in one.seconds for one in same)]
        if len(same) == len(of_ranks) and names:
            seconds = {name: max(one.seconds[name] for one in same) for name in names}
            found.append(TimedRows(first.rows, first.tokens, first.method, seconds))
    return tuple(found)
