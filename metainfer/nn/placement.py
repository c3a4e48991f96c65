"""Placement: how the ranks of a group share one model, in steps of either kind.

By heads, every rank computes all rows with its share of heads and of inner channels, and sums are
made over ranks: decoding, and all short steps. By tokens, ranks compute their own rows with whole
heads (or with the heads of a smaller group) and give each other what others need: long prefills.
Weights and caches are the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.arch.split import own_experts
from metainfer.comm.group import Group, Solo
from metainfer.core.errors import MetainferError


@dataclass(frozen=True, slots=True)
class Side:
    """Attributes:
    heads: ranks with the same rows, over which heads and inner channels are divided.
    rows: ranks with the same heads, over which rows are dealt.
    """

    heads: Group
    rows: Group


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one rank.

    Attributes:
        group: all ranks; routed experts and the head are divided over it in every step.
        by_heads: whose `heads` is `group`.
        by_tokens: None where no step is sharded over tokens.
        expert: parts of the ranks over which routed experts are dealt.
    """

    group: Group
    by_heads: Side
    by_tokens: Side | None = None
    expert: int = 1

    @property
    def context(self) -> int:
        """Ranks over which rows are dealt at most."""
        return 1 if self.by_tokens is None else self.by_tokens.rows.size

    def own_experts(self, count: int) -> range:
        """Of `count` routed experts those that this rank has."""
        return own_experts(count, self.group.rank, self.group.size, self.expert)


def place(group: Group, context: int = 1, expert: int = 1) -> Placement:
    """The placement of this rank.

    Args:
        context: ranks over which long prefills deal their rows; the heads of each such rank are
            divided again by heads. 1: every step is computed by heads.
        expert: parts over which whole experts are dealt. 1: each rank has a slice of every expert.

    Raises:
        MetainferError: `context` does not divide the ranks.
    """
    if context < 1 or group.size % context:
        raise MetainferError(f"rows cannot be dealt over {context} of {group.size} ranks")
    by_heads = Side(group, Solo())
    if context == 1:
        return Placement(group, by_heads, expert=expert)
    head, row = divmod(group.rank, context)
    rows = group.part(range(head * context, (head + 1) * context))
    heads = group.part(range(row, group.size, context))
    return Placement(group, by_heads, Side(heads, rows), expert)
