"""TokenShares: what one rank computes of a prefill step that is sharded over tokens, and the rows
that ranks give each other for it. Everything here is on the host; ranks need not agree on more
than on the step.

Rows of a step are numbered as in its StepInputs. A rank's own rows T keep their order. Behind them
stand rows that it takes from others; own and taken rows together are its extended rows. Before
them stand rows of the rings, of what chunks see from before they began, as all ranks have them.

Shape suffixes: T own rows, E extended rows, H ring rows, G rows that each rank gives, K rows that
rings keep, N rows that a reader sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from metainfer.plan.dealing import Chunk, Run, deal, units

Numbers: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Reader:
    """One that sees rows which follow each other in a sequence: a run's attention or compressor.

    Attributes:
        sequence: whose.
        first: position of the first row that it sees; may be before the sequence.
        run: the own positions that it is for.
        rows_N: of [ring rows | extended rows] those that it sees.
    """

    sequence: int
    first: int
    run: Run
    rows_N: Numbers


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of one kind of state, of all sequences of the step.

    Attributes:
        given_G: own rows that others take; shorter lists are filled up with row 0, so that every
            rank gives as many.
        taken: rows of the pool [ranks * G] of what all gave that stand behind the own ones.
        rows_E: which rows of the step the extended rows are.
        halo_H: (sequence, position) of ring rows that are read before the rings are written.
        kept_K: extended rows that go into the rings.
        places_K: (sequence, position) of these.
        readers: of this rank's runs, ascending.
    """

    given_G: Numbers
    taken: Numbers
    rows_E: Numbers
    halo_H: tuple[Numbers, Numbers]
    kept_K: Numbers
    places_K: tuple[Numbers, Numbers]
    readers: tuple[Reader, ...]


@dataclass(frozen=True, slots=True)
class SharedEntries:
    """Entries that windows of the step close, of all sequences.

    Attributes:
        most: as many as each rank gives; shorter ones are filled up.
        order: rows of the pool [ranks * most], by sequence and window.
        counts: how many of them each sequence has.
    """

    most: int
    order: Numbers
    counts: tuple[int, ...]


class TokenShares:
    """Attributes:
    rows_T: which rows of the step are this rank's.
    counts: own rows of each sequence.
    most_rows: of any rank.
    """

    def __init__(self, chunks: Sequence[Chunk], ranks: int, rank: int) -> None:
        """Raises MetainferError where there are too few tokens for so many ranks."""
        self._chunks = tuple(chunks)
        self._ranks, self._rank = ranks, rank
        self._begins = (0, *accumulate(chunk.stop - chunk.first for chunk in chunks))
        self._runs = deal(chunks, ranks)
        total = self._begins[-1]
        self._owner: Numbers = np.empty(total, np.int64)  # of each row of the step
        for begin, chunk, runs in zip(self._begins, chunks, self._runs, strict=False):
            for run in runs:
                self._owner[begin + run.first - chunk.first : begin + run.stop - chunk.first] = (
                    run.owner
                )
        self._local = _places(self._owner, np.ones(total, bool), ranks)
        rows = np.bincount(self._owner, minlength=ranks)
        self.most_rows = int(rows.max())
        self.rows_T = np.flatnonzero(self._owner == rank)
        self.counts = tuple(
            sum(len(run) for run in runs if run.owner == rank) for runs in self._runs
        )

    def wanted(self, counts: Sequence[int]) -> tuple[tuple[int, ...], int, Numbers]:
        """Where of each sequence so many of the last rows go on: how many of the own ones (of all
        sequences together one at least, so that nothing computes without rows), the most that any
        rank has, and of the pool [ranks * most] the rows that are wanted, in the order of the step.
        """
        is_wanted: Mask = np.zeros(self._begins[-1], bool)
        for end, count in zip(self._begins[1:], counts, strict=True):
            is_wanted[end - count : end] = True
        slots = _places(self._owner, is_wanted, self._ranks)
        most = max(1, int(slots.max(initial=-1)) + 1)
        own = [
            int((is_wanted & (self._owner == self._rank))[begin:end].sum())
            for begin, end in zip(self._begins, self._begins[1:], strict=False)
        ]
        if not any(own):
            own[max(place for place, count in enumerate(self.counts) if count)] = 1
        rows = np.flatnonzero(is_wanted)
        return tuple(own), most, self._owner[rows] * most + slots[rows]

    def latents(self, window: int) -> SharedRows:
        """Of the last `window` tokens, a row's own among them."""
        back = window - 1
        return self._shared(
            lambda run: max(0, run.first - back), lambda run: run.stop, lambda end: end - back
        )

    def states(self, ratio: int, span: int) -> SharedRows:
        """Of compressors whose windows are `ratio` tokens and whose entries mix `span`. Each run
        that closes windows has a reader."""
        before = span - ratio

        def first(run: Run) -> int:
            return run.first // ratio * ratio - before

        def stop(run: Run) -> int:
            return run.stop // ratio * ratio

        return self._shared(first, stop, lambda end: end // ratio * ratio - before)

    def entries(self, ratio: int) -> SharedEntries:
        """Of windows of `ratio` tokens."""
        closing: list[Numbers] = []
        counts: list[int] = []
        for begin, chunk in zip(self._begins, self._chunks, strict=False):
            windows = np.arange(chunk.first // ratio, chunk.stop // ratio)
            closing.append(begin + (windows + 1) * ratio - 1 - chunk.first)
            counts.append(len(windows))
        rows = np.concatenate(closing)
        closes: Mask = np.zeros(self._begins[-1], bool)
        closes[rows] = True
        slots = _places(self._owner, closes, self._ranks)
        most = int(slots.max(initial=-1)) + 1
        return SharedEntries(most, self._owner[rows] * most + slots[rows], tuple(counts))

    def _shared(
        self,
        first: Callable[[Run], int],
        stop: Callable[[Run], int],
        kept_from: Callable[[int], int],
    ) -> SharedRows:
        """
        Args:
            first, stop: positions that the reader of a run sees; there is none where all of them
                lie before the run.
            kept_from: first position that the rings must have when a chunk ends at a position.
        """
        needed: list[Mask] = [np.zeros(self._begins[-1], bool) for _ in range(self._ranks)]
        kept: Mask = np.zeros(self._begins[-1], bool)
        for begin, chunk, runs in zip(self._begins, self._chunks, self._runs, strict=False):
            for run in runs:
                seen = slice(
                    begin + max(first(run), chunk.first) - chunk.first,
                    begin + max(run.first, chunk.first) - chunk.first,
                )
                needed[run.owner][seen] = True
            kept_first = max(kept_from(chunk.stop), chunk.first)
            kept[begin + kept_first - chunk.first : begin + chunk.stop - chunk.first] = True
        foreign = [(need | kept) & (self._owner != rank) for rank, need in enumerate(needed)]
        given = np.logical_or.reduce(foreign)
        slots = _places(self._owner, given, self._ranks)
        most = int(slots.max(initial=-1)) + 1
        own_given = self._local[given & (self._owner == self._rank)]
        taken_rows = np.flatnonzero(foreign[self._rank])
        extended = np.full(self._begins[-1], -1)  # place of each row of the step
        extended[self.rows_T] = np.arange(len(self.rows_T))
        extended[taken_rows] = len(self.rows_T) + np.arange(len(taken_rows))
        halo, halo_begins = self._halo(first)
        kept_rows = np.flatnonzero(kept)
        return SharedRows(
            given_G=np.pad(own_given, (0, most - len(own_given))),
            taken=self._owner[taken_rows] * most + slots[taken_rows],
            rows_E=np.concatenate([self.rows_T, taken_rows]),
            halo_H=halo,
            kept_K=extended[kept_rows],
            places_K=self._places(kept_rows),
            readers=tuple(self._readers(first, stop, extended + len(halo[0]), halo_begins)),
        )

    def _halo(self, first: Callable[[Run], int]) -> tuple[tuple[Numbers, Numbers], list[int]]:
        """Ring rows of what lies before the chunks, and where those of each sequence begin."""
        sequences, positions, begins = [], [], [0]
        for sequence, (chunk, runs) in enumerate(zip(self._chunks, self._runs, strict=True)):
            before = np.arange(min(first(runs[0]), chunk.first), chunk.first)
            sequences.append(np.full(len(before), sequence))
            positions.append(before)
            begins.append(begins[-1] + len(before))
        return (np.concatenate(sequences), np.concatenate(positions)), begins

    def _readers(
        self,
        first: Callable[[Run], int],
        stop: Callable[[Run], int],
        places: Numbers,
        halo_begins: Sequence[int],
    ) -> list[Reader]:
        """
        Args:
            places: in [ring rows | extended rows], of each row of the step.
        """
        readers = []
        for sequence, (chunk, runs) in enumerate(zip(self._chunks, self._runs, strict=True)):
            begin = self._begins[sequence]
            for run in runs:
                if run.owner != self._rank or stop(run) <= run.first:
                    continue
                from_ring = max(0, chunk.first - first(run))
                ring_end = halo_begins[sequence + 1]
                rows = slice(max(first(run), chunk.first) - chunk.first, stop(run) - chunk.first)
                seen = places[begin + rows.start : begin + max(rows.start, rows.stop)]
                ring = np.arange(ring_end - from_ring, ring_end)
                readers.append(Reader(sequence, first(run), run, np.concatenate([ring, seen])))
        return readers

    def _places(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """(sequence, position) of rows of the step."""
        sequences = np.asarray(np.searchsorted(self._begins, rows, side="right") - 1, np.int64)
        starts = np.array([chunk.first for chunk in self._chunks])
        return sequences, rows - np.array(self._begins)[sequences] + starts[sequences]


def can_share(chunks: Sequence[Chunk], ranks: int) -> bool:
    """Whether a step has tokens for every rank."""
    return units(chunks) >= ranks


def _places(owner: Numbers, chosen: Mask, ranks: int) -> Numbers:
    """The place of each chosen row among the chosen rows of its owner."""
    places = np.full(len(owner), -1)
    for rank in range(ranks):
        own = np.flatnonzero(chosen & (owner == rank))
        places[own] = np.arange(len(own))
    return places
