"""Stored: the tensors of any model that can be planned for, in the formats that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from metainfer.arch import manifest
from metainfer.arch.attention_sides import V41_FAMILY
from metainfer.arch.manifest_mla import iterate_mla
from metainfer.arch.manifest_v41 import iterate_v41
from metainfer.arch.record import Quantisation
from metainfer.arch.shapes import ModelShape
from metainfer.arch.tensors import TensorSpec


def tensors_of(
    shape: ModelShape, quantisation: Quantisation | None = None, every_expert: bool = True
) -> Iterator[TensorSpec]:
    """The tensors one by one, drafting blocks, Engram tables and image tower among them.

    Args:
        quantisation: of the matrices; None for the released one.
        every_expert: otherwise the first routed expert of a layer stands for all.
    """
    shape = replace(shape, quantisation=quantisation or shape.quantisation)
    if shape.arch is not None:
        arch = replace(shape.arch, quantisation=shape.quantisation)
        return manifest.iterate(arch, every_expert)
    if shape.side.family == V41_FAMILY:
        return iterate_v41(shape, every_expert)
    return iterate_mla(shape, every_expert)
