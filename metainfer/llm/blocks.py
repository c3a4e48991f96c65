"""BlockPool: who holds which block of the cache. Ids only; the bytes are `nn.cache`'s.

Two scopes (arch.cache_kinds.Scope): a TOKENS block covers BLOCK_TOKENS tokens of one sequence in
every growing kind; a SEQUENCE slot holds the rings of one sequence. Both are reference counted, so
that a fork or a shared prefix can hold what another sequence holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from metainfer.core.errors import MetainferError


class InvariantError(MetainferError):
    """The bookkeeping contradicts itself: a bug of metainfer, never of the user."""


class Allocator:
    """The ids 0 .. count - 1 of one scope, each free or held by one or more owners.

    The id freed last is given out first: memory that was never needed stays untouched.
    """

    def __init__(self, count: int, what: str) -> None:
        self.count = count
        self._what = what
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, block: int) -> int:
        """Owners of `block`; one that has more than one must be copied before it is written."""
        return self._references[block]

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` ids, each with one owner. Raises InvariantError if fewer are free: callers ask
        `num_free` first."""
        if count > len(self._free):
            raise InvariantError(f"{count} {self._what}s asked for, {len(self._free)} are free")
        taken = tuple(self._free.pop() for _ in range(count))
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Give each of `blocks` one more owner. Raises InvariantError if one is free."""
        for block in blocks:
            if self._references[block] < 1:
                raise InvariantError(f"{self._what} {block} is shared but has no owner")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each of `blocks`; those without an owner become free. Raises
        InvariantError if one is free already."""
        for block in blocks:
            if self._references[block] < 1:
                raise InvariantError(f"{self._what} {block} is freed twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_all_free(self) -> None:
        """Raise InvariantError unless nobody holds any; takes no time, whatever the count."""
        held = self.count - self.num_free
        if held:
            raise InvariantError(f"nobody is left, and {held} {self._what}s are held")

    def check(self, held: Iterable[int]) -> None:
        """Raise InvariantError unless exactly `held` (an id once per owner) is held and every
        other id is free, once."""
        owners = Counter(held)
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError(f"a {self._what} is in the free list twice")
        for block in range(self.count):
            references = self._references[block]
            if references != owners[block]:
                raise InvariantError(
                    f"{self._what} {block} counts {references} owners but has {owners[block]}"
                )
            if (references == 0) != (block in free):
                raise InvariantError(
                    f"{self._what} {block} has {references} owners and is"
                    f" {'free' if block in free else 'not free'}"
                )
        strangers = (free | set(owners)) - set(range(self.count))
        if strangers:
            raise InvariantError(f"unknown {self._what}s: {sorted(strangers)}")


class BlockPool:
    """The blocks and slots of one cache."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.blocks = Allocator(num_blocks, "block")
        self.slots = Allocator(num_slots, "slot")

    def check(self, blocks: Iterable[int], slots: Iterable[int]) -> None:
        """Raise InvariantError unless the pool agrees with what the owners say they hold."""
        self.blocks.check(blocks)
        self.slots.check(slots)

    def check_all_free(self) -> None:
        """Raise InvariantError unless nobody holds any."""
        self.blocks.check_all_free()
        self.slots.check_all_free()
