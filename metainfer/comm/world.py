"""World: what the processes of all ranks on one host share, made by whoever starts them."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from metainfer.comm.group import DEADLINE_S
from metainfer.comm.shared_memory import SharedMemory
from metainfer.comm.watch import RECORD_BYTES, Watch, give_up
from metainfer.core.errors import MetainferError

MOST_RANKS = 64
_PAGE = 4096
_PIECE_BYTES = 2 * 2**20
_SLOTS = 16
CHANNEL_PIECE_BYTES = 256 * 1024
CHANNEL_PIECES = 2


class World:
    """Goes to the processes when they are started, and stays the same for as long as they live.

    Memory takes room only where it was written. For each rank there are slots, one for each group
    that it is in: counters, two halves for pieces that all members read, and for each other member
    a channel.

    Attributes:
        size: ranks.
        deadline_s: how long a rank waits for others.
        piece_bytes: of a half.
        slot_bytes: of a slot, whole pages.
        memory: shared by all.
        folder: for files in which libraries let ranks find each other.
    """

    def __init__(
        self, size: int, *, deadline_s: float = DEADLINE_S, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        if not 1 <= size <= MOST_RANKS:
            raise MetainferError(f"a world has 1 to {MOST_RANKS} ranks, not {size}")
        if piece_bytes % _PAGE or piece_bytes <= 0:
            raise MetainferError(f"pieces are of whole pages of {_PAGE} bytes, not {piece_bytes}")
        self.size, self.deadline_s, self.piece_bytes = size, deadline_s, piece_bytes
        self._first = -(-size * RECORD_BYTES // _PAGE) * _PAGE
        self._channels_bytes = size * CHANNEL_PIECES * CHANNEL_PIECE_BYTES
        self.slot_bytes = _PAGE + 2 * piece_bytes + self._channels_bytes
        self.memory = SharedMemory(self._first + size * _SLOTS * self.slot_bytes)
        self.folder = Path(tempfile.mkdtemp(prefix="metainfer-"))

    def counters_at(self, rank: int, slot: int) -> int:
        """Byte at which a page of counters of a rank begins."""
        if slot >= _SLOTS:
            raise MetainferError(f"a rank can be in {_SLOTS} groups, and this would be another")
        return self._first + (rank * _SLOTS + slot) * self.slot_bytes

    def half_at(self, rank: int, slot: int, number: int) -> int:
        """Where the piece of an even or an odd round begins."""
        return self.counters_at(rank, slot) + _PAGE + number % 2 * self.piece_bytes

    def channel_at(self, rank: int, slot: int, to: int, number: int) -> int:
        """Where piece `number` from `rank` to member `to` begins."""
        place = to * CHANNEL_PIECES + number % CHANNEL_PIECES
        begin = self.counters_at(rank, slot) + _PAGE + 2 * self.piece_bytes
        return begin + place * CHANNEL_PIECE_BYTES

    def give_up(self, rank: int, why: str) -> None:
        """End what all ranks wait for, since `rank` is lost."""
        give_up(self.memory, rank, why)

    def close(self) -> None:
        """By whoever made it, after the processes have ended or while they end."""
        with suppress(BufferError):  # a group of this process is still there
            self.memory.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def join(world: World, rank: int) -> Watch:
    """Be there as `rank`, once all are. Raises GroupError."""
    watch = Watch(world.memory, rank, world.size, world.deadline_s)
    watch.join()
    return watch
