"""Shapes: what planning needs of a model beside its attention, whether it is served yet or not."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from metainfer.arch.attention import AttentionSide
from metainfer.arch.record import Arch, Quantisation


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Blocks of the checkpoint that draft tokens.

    Attributes:
        blocks: of them; each is a layer of the model with experts of its own.
        experts, experts_per_token: routed ones of a block.
        rows: tokens drafted at a time, which are rows of a step beside the sequence's own.
        inputs: layers whose streams it reads; 0 where it reads the last one's.
        markov_rank: width of the table that links drafted tokens; 0 for none.
    """

    blocks: int
    experts: int
    experts_per_token: int
    rows: int
    inputs: int = 0
    markov_rank: int = 0


@dataclass(frozen=True, slots=True)
class EngramShape:
    """Tables of n-grams that are read before some layers.

    Attributes:
        layers: before which a table is read.
        rows: of each of these tables.
        width: channels of a row: e4m3, with a scale byte for each 32.
        rows_per_token: that a token reads of each table.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    width: int
    rows_per_token: int

    @property
    def row_bytes(self) -> int:
        return self.width + self.width // ENGRAM_BLOCK


ENGRAM_BLOCK = 32
"""Channels of a row of an Engram table that share a scale."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The image tower; text alone does not need it."""

    layers: int
    width: int
    inner: int
    patch: int
    downsample: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths in elements.

    Attributes:
        side: of attention.
        quantisation: of the released checkpoint.
        experts, experts_per_token, shared_experts: of each layer that has experts.
        expert_width: channels between the products of an expert, routed or shared.
        dense_layers: first layers, which have one wide network in place of experts.
        dense_width: channels between its products.
        hash_layers: first layers, whose router is a table.
        arch: where the model is served.
    """

    side: AttentionSide
    vocab_size: int
    quantisation: Quantisation
    experts: int
    experts_per_token: int
    shared_experts: int
    expert_width: int
    dense_layers: int = 0
    dense_width: int = 0
    hash_layers: int = 0
    draft: DraftShape | None = None
    engram: EngramShape | None = None
    vision: VisionShape | None = None
    arch: Arch | None = None

    @property
    def name(self) -> str:
        return self.side.name

    @property
    def num_layers(self) -> int:
        return len(self.side.layers)


def shape_key(shape: ModelShape) -> str:
    """Of all that planning reads of a model but its name: 16 hexadecimal digits."""
    unnamed = replace(shape, side=replace(shape.side, name=""), arch=None)
    return hashlib.sha256(repr(unnamed).encode()).hexdigest()[:16]
