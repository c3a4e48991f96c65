"""Placement: how the ranks of a group share one model, in steps of either kind.

By heads, every rank computes all rows with its share of heads and of inner channels, and sums are
made over ranks: decoding, and all short steps. By tokens, ranks compute their own rows with whole
heads (or with the heads of a smaller group) and give each other what others need: long prefills.
Weights and caches are the same for both.

In a pipeline each stage has some of the layers and a group of ranks of its own, which share those.
Ranks that have the same place in their groups hand streams on from stage to stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from metainfer.arch.split import own_experts
from metainfer.arch.stages import Stage, place_of, stage_of
from metainfer.comm.group import Group, Solo
from metainfer.core.errors import MetainferError
from metainfer.nn.kv_shards import KvShards


@dataclass(frozen=True, slots=True)
class Side:
    """Attributes:
    heads: ranks with the same rows, over which heads and inner channels are divided.
    rows: ranks with the same heads, over which rows are dealt.
    """

    heads: Group
    rows: Group


@dataclass(frozen=True, slots=True)
class Pipe:
    """The stages as a rank sees them.

    Attributes:
        group: of one rank of each stage, in the order of stages.
        stage: of this rank.
    """

    group: Group
    stage: Stage

    def hand_on(self, streams_TSD: torch.Tensor) -> None:
        """To the next stage."""
        self.group.send(streams_TSD, self.stage.number + 1)

    def take(self, like_TSD: torch.Tensor) -> torch.Tensor:
        """What the stage before hands on: of the shape and dtype of `like_TSD`."""
        return self.group.receive(like_TSD, self.stage.number - 1)


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one rank.

    Attributes:
        group: all ranks of its stage; routed experts and the head are divided over it in every
            step.
        by_heads: whose `heads` is `group`.
        by_tokens: None where no step is sharded over tokens.
        expert: parts of the ranks over which routed experts are dealt.
        pipe: None where one stage has all layers.
        kv: over which the growing caches are divided.
    """

    group: Group
    by_heads: Side
    by_tokens: Side | None = None
    expert: int = 1
    pipe: Pipe | None = None
    kv: KvShards = field(default_factory=lambda: KvShards(Solo()))

    @property
    def context(self) -> int:
        """Ranks over which rows are dealt at most."""
        return 1 if self.by_tokens is None else self.by_tokens.rows.size

    def own_experts(self, count: int) -> range:
        """Of `count` routed experts those that this rank has."""
        return own_experts(count, self.group.rank, self.group.size, self.expert)


def place(
    world: Group,
    layers: int,
    *,
    context: int = 1,
    expert: int = 1,
    stages: int = 1,
    kv_shards: int = 1,
) -> Placement:
    """The placement of this rank.

    Args:
        world: all ranks, of all stages.
        layers: of the model.
        context: ranks of a stage over which long prefills deal their rows; the heads of each such
            rank are divided again by heads. 1: every step is computed by heads.
        expert: parts over which whole experts are dealt. 1: each rank has a slice of every expert.
        kv_shards: ranks of a stage, which follow each other, that divide the growing caches.

    Raises:
        MetainferError: the ranks cannot be divided so.
    """
    if stages < 1 or stages > layers or world.size % stages:
        raise MetainferError(f"{layers} layers on {world.size} ranks cannot be {stages} stages")
    pipe, group = None, world
    size = world.size // stages
    if stages > 1:
        number, place = place_of(world.rank, world.size, stages)
        own = world.rank - place
        group = world.part(range(own, own + size)) if size > 1 else Solo()
        along = world.part([size * (stages - 1 - other) + place for other in range(stages)])
        pipe = Pipe(along, stage_of(number, stages, layers))
    if context < 1 or group.size % context:
        raise MetainferError(f"rows cannot be dealt over {context} of {group.size} ranks")
    by_heads, by_tokens = Side(group, Solo()), None
    if context > 1:
        head, row = divmod(group.rank, context)
        rows = group.part(range(head * context, (head + 1) * context))
        heads = group.part(range(row, group.size, context))
        by_tokens = Side(heads, rows)
    return Placement(group, by_heads, by_tokens, expert, pipe, _kv(group, by_tokens, kv_shards))


def _kv(group: Group, by_tokens: Side | None, shards: int) -> KvShards:
    if shards < 1 or group.size % shards:
        raise MetainferError(f"caches cannot be divided over {shards} of {group.size} ranks")
    if shards == 1:
        return KvShards(Solo())
    # Groups take memory on GPUs: one that is there serves again.
    for known in (group, None if by_tokens is None else by_tokens.rows):
        if known is not None and known.size == shards:
            return KvShards(known)
    first = group.rank // shards * shards
    return KvShards(group.part(range(first, first + shards)))
