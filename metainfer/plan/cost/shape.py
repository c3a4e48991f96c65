"""What the cost model reads off a model's shape: formats of matrices, layers that prompts leave."""

from __future__ import annotations

from dataclasses import replace

from metainfer.arch.attention_sides import V41_FAMILY
from metainfer.arch.record import WeightFormat
from metainfer.arch.shapes import ModelShape
from metainfer.plan.layouts import Formats
from metainfer.plan.weights_by_rank import stored_as

BF16, FP8, FP4, NVFP4, F32 = "bf16", "fp8", "fp4", "nvfp4", "f32"

WEIGHT_BYTES = {BF16: 2.0, FP8: 1.0, FP4: 0.53125, NVFP4: 0.5625, F32: 4.0}
"""Bytes of a number of a matrix: codes and scales. e2m1 in pairs with a scale byte per 32 or 16."""

_NAMES = {
    WeightFormat.F32: F32,
    WeightFormat.BF16: BF16,
    WeightFormat.FP8_BLOCK: FP8,
    WeightFormat.FP4_GROUP: FP4,
    WeightFormat.NVFP4: NVFP4,
}


def linear_format(shape: ModelShape) -> str:
    """Of matrices of attention and of shared experts."""
    return _NAMES[shape.quantisation.linear]


def expert_format(shape: ModelShape) -> str:
    return _NAMES[shape.quantisation.experts]


def in_formats(shape: ModelShape, formats: Formats) -> ModelShape:
    """The model with its matrices as `formats` has them."""
    return replace(shape, quantisation=stored_as(shape, formats))


def expert_part(shape: ModelShape) -> int:
    """Least channels of a routed expert that may stand alone: those of a block of scales."""
    form = expert_format(shape)
    groups = {FP8: max(shape.quantisation.fp8_block), FP4: shape.quantisation.fp4_group, NVFP4: 16}
    return groups.get(form, 1)


def replays_from(shape: ModelShape) -> int | None:
    """The layer from which on a prompt runs over its last window alone, but for the entries that
    this layer writes; None where all rows go through all layers. V4.1 is trained so: from its last
    source of entries on, layers read them and their windows, and nothing else."""
    if shape.side.family != V41_FAMILY:
        return None
    return max((layer.index for layer in shape.side.owners()), default=None)
