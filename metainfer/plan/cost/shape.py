"""What the cost model reads off a model's shape: formats of matrices, layers that prompts leave."""

from __future__ import annotations

from dataclasses import replace

from metainfer.arch.attention_sides import V41_FAMILY
from metainfer.arch.record import WeightFormat
from metainfer.arch.shapes import ModelShape

BF16, FP8, FP4, F32 = "bf16", "fp8", "fp4", "f32"

WEIGHT_BYTES = {BF16: 2.0, FP8: 1.0, FP4: 0.53125, F32: 4.0}
"""Bytes of a number of a matrix: codes and scales. e2m1 in pairs with a scale byte per 32."""

_NAMES = {
    WeightFormat.F32: F32,
    WeightFormat.BF16: BF16,
    WeightFormat.FP8_BLOCK: FP8,
    WeightFormat.FP4_GROUP: FP4,
}


def linear_format(shape: ModelShape) -> str:
    """Of matrices of attention and of shared experts."""
    return _NAMES[shape.quantisation.linear]


def expert_format(shape: ModelShape) -> str:
    return _NAMES[shape.quantisation.experts]


def with_experts(shape: ModelShape, form: str) -> ModelShape:
    """The model with routed experts in `form`, a name of above."""
    kind = next(kind for kind, name in _NAMES.items() if name == form)
    return replace(shape, quantisation=replace(shape.quantisation, experts=kind))


def expert_part(shape: ModelShape) -> int:
    """Least channels of a routed expert that may stand alone: those of a block of scales."""
    form = expert_format(shape)
    return {FP8: max(shape.quantisation.fp8_block), FP4: shape.quantisation.fp4_group}.get(form, 1)


def replays_from(shape: ModelShape) -> int | None:
    """The layer from which on a prompt runs over its last window alone, but for the entries that
    this layer writes; None where all rows go through all layers. V4.1 is trained so: from its last
    source of entries on, layers read them and their windows, and nothing else."""
    if shape.side.family != V41_FAMILY:
        return None
    return max((layer.index for layer in shape.side.owners()), default=None)
