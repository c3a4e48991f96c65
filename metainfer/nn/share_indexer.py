"""ShareIndexer: StepInputs -> what one rank computes of a step that is shared over tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

import numpy as np
import torch

from metainfer.comm.group import Group
from metainfer.nn.inputs import StepInputs, sent
from metainfer.nn.share_index import ExtendedRows, SharedWindows, ShareIndex
from metainfer.nn.step_index import PrefillIndex, StepIndex
from metainfer.nn.step_indexer import StepIndexer
from metainfer.nn.token_shares import (
    Numbers,
    Reader,
    SharedEntries,
    SharedRows,
    TokenShares,
    can_share,
)
from metainfer.plan.dealing import Chunk

_NOTHING: Numbers = np.empty(0, np.int64)


class ShareIndexer:
    """Computes the StepIndex of steps that the ranks of a group share.

    Args:
        rows: the ranks over which rows are dealt.
        steps: of the same model, with its rings and tables.
    """

    def __init__(self, rows: Group, steps: StepIndexer, device: torch.device) -> None:
        self._group, self._steps, self._device = rows, steps, device

    def index(self, inputs: StepInputs) -> StepIndex | None:
        """None where a step is not shared: some of it decodes, or ranks would have no rows."""
        chunks = [
            Chunk(first, first + end - begin)
            for first, (begin, end) in zip(
                inputs.computed, pairwise(inputs.row_starts), strict=True
            )
        ]
        if inputs.num_decode_sequences or not can_share(chunks, self._group.size):
            return None
        shares = TokenShares(chunks, self._group.size, self._group.rank)
        latents = shares.latents(self._steps.window)
        states = {ratio: shares.states(ratio, span) for ratio, span in self._steps.spans.items()}
        entries = {ratio: shares.entries(ratio) for ratio in states}
        counts = inputs.wanted_counts or tuple(b - a for a, b in pairwise(inputs.row_starts))
        own_counts, most_wanted, order = shares.wanted(counts)
        ends = list(accumulate(shares.counts))
        wanted = [np.arange(end - own, end) for end, own in zip(ends, own_counts, strict=True)]

        # What the host works out goes to the device in one copy, and is taken in the same order.
        vectors = [latents.rows_E, np.concatenate(wanted), order]
        vectors += [_reading_places(latents.readers, number) for number in range(len(chunks))]
        vectors += self._vectors(inputs, latents, self._steps.window_ring)
        vectors += [_seen(latents.readers, number) for number in range(len(chunks))]
        for ratio, shared in states.items():
            vectors += [shared.rows_E, entries[ratio].order]
            vectors += self._vectors(inputs, shared, self._steps.ring(ratio))
            vectors += [reader.rows_N for reader in shared.readers]
        whole = sent(np.concatenate(vectors), self._device)
        found = iter(whole.split([len(vector) for vector in vectors]))

        rows_E, wanted_rows_W, order_W = next(found), next(found), next(found)
        places = [next(found) for _ in chunks]
        own_latents = self._extended(found, len(chunks))
        end = max(chunk.stop for chunk in chunks)
        positions_E = inputs.positions_T.index_select(0, rows_E)
        entry_rows = [
            self._steps.entry_rows(inputs, number, chunk.stop)
            for number, chunk in enumerate(chunks)
        ]
        index = ShareIndex(
            group=self._group,
            latents=own_latents,
            sliding_ER2=self._steps.sliding.rows(positions_E, end),
            compressing_ER2=self._steps.compressing.rows(positions_E, end),
            ring_rows_E=_scattered(own_latents, len(rows_E)),
            windows={
                ratio: self._windows(
                    found, ratio, inputs, chunks, shared, entries[ratio],
                    [own_rows[ratio] for own_rows, *_ in entry_rows],
                )
                for ratio, shared in states.items()
            },
            most_rows=shares.most_rows,
            wanted_counts=own_counts,
            wanted_rows_W=wanted_rows_W,
            most_wanted=most_wanted,
            order_W=order_W,
        )  # fmt: skip
        return StepIndex(
            token_ids_T=inputs.token_ids_T.index_select(0, rows_E[: ends[-1]]),
            sliding_TR2=index.sliding_ER2[: ends[-1]],
            compressing_TR2=index.compressing_ER2[: ends[-1]],
            ring_rows_T=index.ring_rows_E[: ends[-1]],
            phase_T={},
            decode=None,
            prefills=tuple(
                _prefill(slice(stop - count, stop), positions_E, place, *rows[1:])
                for stop, count, place, rows in zip(
                    ends, shares.counts, places, entry_rows, strict=True
                )
            ),
            shares=index,
        )

    def _windows(
        self,
        found: Iterator[torch.Tensor],
        ratio: int,
        inputs: StepInputs,
        chunks: Sequence[Chunk],
        shared: SharedRows,
        entries: SharedEntries,
        own_rows: Sequence[torch.Tensor],
    ) -> SharedWindows:
        rows_E, order_E = next(found), next(found)
        rows = self._extended(found, len(shared.readers))
        first_windows = tuple(reader.run.first // ratio for reader in shared.readers)
        rotations = []
        for reader, first in zip(shared.readers, first_windows, strict=True):
            stop = reader.run.stop // ratio * ratio
            tokens_E = torch.arange(first * ratio, stop, ratio, device=self._device)
            rotations.append(self._steps.compressing.rows(tokens_E, stop))
        closed = [(chunk.first // ratio, chunk.stop // ratio) for chunk in chunks]
        targets = [
            self._steps.kept_rows(own_E, first, ratio)
            for own_E, (first, _) in zip(own_rows, closed, strict=True)
        ]
        return SharedWindows(
            rows=rows,
            phase_E=inputs.positions_T.index_select(0, rows_E) % ratio,
            first_windows=first_windows,
            rotations=tuple(rotations),
            most=entries.most,
            order_E=order_E,
            kept_E=self._steps.kept(closed, ratio),
            target_rows_E=torch.cat(targets),
        )

    @staticmethod
    def _vectors(inputs: StepInputs, shared: SharedRows, ring: int) -> list[Numbers]:
        """What `_extended` takes, but for what readers see."""
        slots = np.array(inputs.slots)

        def ring_rows(places: tuple[Numbers, Numbers]) -> Numbers:
            """Negative positions fall on rows of the slot as well."""
            sequences, positions = places
            return slots[sequences] * ring + positions % ring

        return [
            shared.given_G,
            shared.taken,
            ring_rows(shared.halo_H),
            shared.kept_K,
            ring_rows(shared.places_K),
        ]

    def _extended(self, found: Iterator[torch.Tensor], readers: int) -> ExtendedRows:
        given_G, taken_X, halo_rows_H, kept_K, ring_rows_K = islice(found, 5)
        seen = tuple(islice(found, readers))
        return ExtendedRows(self._group, given_G, taken_X, halo_rows_H, kept_K, ring_rows_K, seen)


def _prefill(
    part: slice,
    positions_E: torch.Tensor,
    latent_rows_P: torch.Tensor,
    entry_rows: dict[int, torch.Tensor],
    given_rows: dict[int, torch.Tensor],
) -> PrefillIndex:
    return PrefillIndex(
        rows=part,
        attending=part,
        queries=part,
        positions_P=positions_E[part],
        latent_rows_P=latent_rows_P,
        entry_rows=entry_rows,
        given_rows=given_rows,
        chunk=None,
    )


def _scattered(rows: ExtendedRows, count: int) -> torch.Tensor:
    """The ring row of each of `count` extended rows, -1 for those that are not kept."""
    ring_rows_E = rows.kept_K.new_full((count,), -1)
    return ring_rows_E.index_copy_(0, rows.kept_K, rows.ring_rows_K)


def _seen(readers: Sequence[Reader], sequence: int) -> Numbers:
    """What the readers of a sequence see, one behind the other."""
    own = [reader.rows_N for reader in readers if reader.sequence == sequence]
    return np.concatenate([_NOTHING, *own])


def _reading_places(readers: Sequence[Reader], sequence: int) -> Numbers:
    """Of the own rows of a sequence, ascending: where each stands in what its readers see."""
    places, begin = [_NOTHING], 0
    for reader in readers:
        if reader.sequence == sequence:
            places.append(begin + np.arange(reader.run.first, reader.run.stop) - reader.first)
            begin += len(reader.rows_N)
    return np.concatenate(places)
