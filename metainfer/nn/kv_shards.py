"""KvShards: the growing caches of sequences, divided over ranks.

A block of the tables stands for BLOCK_TOKENS tokens on each shard: shard r has the r-th part of
its tokens. So the tables are the same on all ranks, each keeps a part of the entries, and has them
in the order of the sequence. Rings are on every rank.

Decode rows attend where the entries are (`sharded_decode`). Prefill reads all entries of a sequence
from a pool of what the shards give.

Shape suffixes: S shards, W window, L rows that each shard gives for a pool, T K D as elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.comm.group import Group
from metainfer.nn.inputs import Numbers
from metainfer.ops.attention import shard_window


@dataclass(frozen=True, slots=True)
class KvShards:
    """Which entries this rank has.

    Attributes:
        group: of the shards of the same sequences; of one rank where caches are whole.
    """

    group: Group

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def own(self) -> int:
        """Number of this rank's shard."""
        return self.group.rank

    def held(self, entries: int, ratio: int) -> int:
        """How many of the first `entries` entries of a sequence it has."""
        part = BLOCK_TOKENS // ratio
        rounds, rest = divmod(entries, part * self.size)
        return rounds * part + min(max(rest - self.own * part, 0), part)

    def held_of(self, entries_T: torch.Tensor, ratio: int) -> torch.Tensor:
        """Likewise, of several numbers."""
        part = BLOCK_TOKENS // ratio
        rounds_T = entries_T // (part * self.size)
        rest_T = entries_T - rounds_T * (part * self.size)
        return rounds_T * part + (rest_T - self.own * part).clamp_(0, part)

    def given(self, entries: int, ratio: int) -> int:
        """L: rows that each shard gives for the pool of so many entries of a sequence."""
        part = BLOCK_TOKENS // ratio
        return -(-entries // (part * self.size)) * part

    def place(self, entries_N: torch.Tensor, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(shard, place on it) of entries with these numbers."""
        part = BLOCK_TOKENS // ratio
        part_N = entries_N // part
        return part_N % self.size, part_N // self.size * part + entries_N % part

    def numbers(self, places_N: torch.Tensor, ratio: int) -> torch.Tensor:
        """Of entries of this shard by their places, numbers among all of the sequence."""
        part = BLOCK_TOKENS // ratio
        return (places_N // part * self.size + self.own) * part + places_N % part

    def kept(self, first: int, stop: int, ratio: int) -> Numbers:
        """Of the entries first .. stop - 1 those that this shard has, counted from `first` on."""
        entries = np.arange(first, stop)
        return np.flatnonzero(entries // (BLOCK_TOKENS // ratio) % self.size == self.own)

    def window(self, rows_TW: torch.Tensor) -> torch.Tensor:
        """This shard's part of a list of what rows see of the window, so that each token is seen on
        one of them; dense."""
        width = shard_window(rows_TW.shape[1], self.size)
        missing = width * self.size - rows_TW.shape[1]
        if missing:
            rows_TW = torch.nn.functional.pad(rows_TW, (0, missing), value=-1)
        return rows_TW[:, self.own * width : (self.own + 1) * width].contiguous()

    def pooled(self, rows_ND: torch.Tensor, given_L: torch.Tensor) -> torch.Tensor:
        """[S L, D]: what each shard gives of its cache. All shards call it together."""
        return self.group.all_gather(rows_ND.index_select(0, given_L))

    def best(self, ids_TK: torch.Tensor, scores_TK: torch.Tensor, ratio: int) -> torch.Tensor:
        """bool [T, K]: which of the best entries of this shard are among the K best of all: of
        equal scores those with lower numbers, as one rank chooses. All shards call it together.

        Args:
            ids_TK: places on the shard, -1 for none; their scores are never NaN.
        """
        # One whole number for each, larger for a better entry, and no two are equal.
        bits_TK = (scores_TK + 0.0).view(torch.int32)
        ordered_TK = torch.where(bits_TK < 0, bits_TK ^ 0x7FFFFFFF, bits_TK).long()
        backwards_TK = (2**32 - 1) - self.numbers(ids_TK, ratio)
        none = torch.iinfo(torch.int64).min
        ranks_TK = (ordered_TK * 2**32 + backwards_TK).masked_fill_(ids_TK < 0, none)
        pool_STK = self.group.all_gather(ranks_TK).unflatten(0, (self.size, -1))
        pool_TN = pool_STK.transpose(0, 1).flatten(1)
        last_T1 = pool_TN.topk(ids_TK.shape[1], sorted=False).values.amin(1, keepdim=True)
        return (ranks_TK >= last_T1).logical_and_(ids_TK >= 0)
