"""Weights by rank: groups of tensors, and what of each a rank keeps.

Query heads, output groups, shared experts, dense layers and rows of the head are divided over the
tensor ranks; routed experts over all ranks of a group, by expert or by width; Engram tables by rows
over a group, or they lie outside the GPU. All else is on every rank. Context ranks have whole
attention weights, so that what is kept is the larger share of both phases. A stage of a pipeline
has its layers; embedding is on the first, head and drafting blocks on the last.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from metainfer.arch.record import Quantisation, WeightFormat
from metainfer.arch.shapes import ModelShape
from metainfer.arch.stored import tensors_of
from metainfer.arch.tensors import TensorSpec
from metainfer.core.dtypes import DType
from metainfer.core.errors import UserError
from metainfer.plan.layouts import RELEASED, Formats, Layouts
from metainfer.plan.ledger import resident_bytes
from metainfer.plan.settings import Residency

_COMPUTE_BYTES = 2  # bf16

MATRIX_FORMATS = {
    "bf16": WeightFormat.BF16,
    "fp8": WeightFormat.FP8_BLOCK,
    "fp4": WeightFormat.FP4_GROUP,
    "mxfp4": WeightFormat.FP4_GROUP,
    "nvfp4": WeightFormat.NVFP4,
}
"""Words of `Formats.linear` and `Formats.experts` beside `RELEASED`."""


class Share(StrEnum):
    """Over which ranks a tensor is divided."""

    WHOLE = "whole"  # on every rank
    TENSOR = "tensor"
    EXPERTS = "experts"
    DRAFT_EXPERTS = "draft experts"
    GROUP = "group"  # all ranks of a stage


# Names behind "layers.N." -> (group, share); the first that matches.
_OF_LAYERS: tuple[tuple[re.Pattern[str], str, Share], ...] = tuple(
    (re.compile(pattern), group, share)
    for pattern, group, share in (
        (r"(ffn|mlp)\.experts\.", "routed experts", Share.EXPERTS),
        (r"(ffn|mlp)\.shared_experts\.", "shared experts", Share.TENSOR),
        (r"mlp\.(gate|up|down)_proj\.", "dense layers", Share.TENSOR),
        (r"engram\.embed\.", "Engram tables", Share.GROUP),
        (r"engram\.", "Engram products", Share.WHOLE),
        (r"(attn|self_attn)\.indexer\.", "indexer", Share.WHOLE),
        (r"attn\.(wq_b|wo_a|wo_b|attn_sink)", "attention heads", Share.TENSOR),
        (r"self_attn\.(q_b|kv_b|o)_proj\.", "attention heads", Share.TENSOR),
        (r"(attn|self_attn)\.", "latents, compressors", Share.WHOLE),
        (r"", "norms, routers, streams", Share.WHOLE),
    )
)
_LAYER = re.compile(r"(model\.)?(layers|mtp)\.(\d+)\.")
_TOWER = re.compile(r"vision\.|aligner\.|image_")
_EMBEDDING = re.compile(r"(model\.)?embed(_tokens)?\.weight")
_HEAD = re.compile(r"(lm_)?head\.weight")
# A copy of embedding and head within a drafting block is not loaded.
_COPY = re.compile(r"embed_tokens\.|shared_head\.head\.")

GROUPS = (
    "routed experts",
    "shared experts",
    "dense layers",
    "attention heads",
    "latents, compressors",
    "indexer",
    "norms, routers, streams",
    "embedding",
    "head",
    "Engram tables",
    "Engram products",
    "drafting blocks",
)
"""In the order of a ledger."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which stages of a pipeline have a tensor: that of a layer, the first or the last one."""

    layer: int = -1
    first: bool = False
    last: bool = False


FIRST, LAST = Place(first=True), Place(last=True)


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one group, share and place, and their bytes in memory, of all ranks together."""

    group: str
    share: Share
    place: Place
    bytes: int


def stored_as(shape: ModelShape, formats: Formats) -> Quantisation:
    """How the matrices are kept.

    Raises UserError for a word that is no format.
    """
    own = shape.quantisation
    linear = _format(shape, "linear", formats.linear, own.linear)
    experts = _format(shape, "experts", formats.experts, own.experts)
    converted = own.linear is WeightFormat.BF16 and linear is not own.linear
    scales = DType.F32 if converted else own.fp8_scale_dtype
    return replace(own, linear=linear, experts=experts, fp8_scale_dtype=scales)


def _format(shape: ModelShape, name: str, word: str, released: WeightFormat) -> WeightFormat:
    known = tuple(MATRIX_FORMATS) if name == "experts" else ("bf16", "fp8")
    if word == RELEASED:
        return released
    if word not in known:
        raise UserError(
            f"{name} of {shape.name} in {word}: there is no such format",
            hint="formats: " + ", ".join((RELEASED, *known)),
        )
    return MATRIX_FORMATS[word]


def weight_parts(shape: ModelShape, formats: Formats) -> tuple[Part, ...]:
    """All tensors that are loaded, by group, share and place. The image tower is not."""
    sums: Counter[tuple[str, Share, Place]] = Counter()
    for spec in tensors_of(shape, stored_as(shape, formats), every_expert=False):
        if _TOWER.match(spec.name):
            continue
        for key, copies in keys_of(shape, spec, formats.draft > 0):
            size = resident_bytes(spec, Residency.QUANTISED, _COMPUTE_BYTES)
            sums[key] += size * copies
    return tuple(Part(*key, size) for key, size in sums.items())


def keys_of(
    shape: ModelShape, spec: TensorSpec, draft: bool
) -> Iterator[tuple[tuple[str, Share, Place], int]]:
    """Where the bytes of a tensor go, and how many of its kind it stands for."""
    layer = _LAYER.match(spec.name)
    if layer is None:
        if _EMBEDDING.fullmatch(spec.name):
            yield ("embedding", Share.WHOLE, FIRST), 1
        elif _HEAD.fullmatch(spec.name):
            yield ("head", Share.TENSOR, LAST), 1
        else:
            yield ("norms, routers, streams", Share.WHOLE, LAST), 1
        return
    rest, number = spec.name[layer.end() :], int(layer[3])
    group, share = _group_of(rest)
    if layer[2] == "layers" and number < shape.num_layers:
        copies = shape.experts if share is Share.EXPERTS else 1
        yield (group, share, Place(layer=number)), copies
    elif draft and shape.draft is not None and not _COPY.match(rest):
        copies = 1
        if share is Share.EXPERTS:
            share, copies = Share.DRAFT_EXPERTS, shape.draft.experts
        yield ("drafting blocks", share, LAST), copies


def _group_of(name: str) -> tuple[str, Share]:
    return next((group, share) for pattern, group, share in _OF_LAYERS if pattern.match(name))


@dataclass(frozen=True, slots=True)
class Division:
    """Into how many parts a rank's group divides what."""

    tensor: int
    group: int
    expert: int
    expert_slices: int

    def of(self, part: Part, shape: ModelShape) -> int:
        """Bytes of the rank that has most."""
        match part.share:
            case Share.WHOLE:
                return part.bytes
            case Share.TENSOR:
                return -(-part.bytes // self.tensor)
            case Share.GROUP:
                return -(-part.bytes // self.group)
            case Share.EXPERTS:
                return self._experts(part.bytes, shape.experts)
            case Share.DRAFT_EXPERTS:
                return self._experts(part.bytes, shape.draft.experts if shape.draft else 1)

    def _experts(self, size: int, experts: int) -> int:
        held = -(-experts // self.expert)
        return math.ceil(size * held / (experts * self.expert_slices))


def division(layouts: Layouts) -> Division:
    """What both layouts need is kept, once."""
    decode = layouts.decode
    tensor = min(layouts.prefill.tensor, decode.tensor)
    return Division(tensor, decode.group, decode.expert, decode.expert_slices)


def stage_weights(
    shape: ModelShape, parts: Sequence[Part], cut: Division, stages: tuple[range, ...], stage: int
) -> dict[str, int]:
    """Bytes of each group on the fullest rank of one stage."""
    sums: Counter[str] = Counter()
    for part in parts:
        if _on_stage(part.place, stages, stage):
            sums[part.group] += cut.of(part, shape)
        elif (
            part.group == "embedding" and shape.draft is not None and _drafts(parts, stages, stage)
        ):
            sums["drafting blocks"] += part.bytes  # what is drafted is embedded where it is drafted
    return {group: sums[group] for group in GROUPS if sums[group]}


def _on_stage(place: Place, stages: tuple[range, ...], stage: int) -> bool:
    if place.first:
        return stage == 0
    if place.last:
        return stage == len(stages) - 1
    return place.layer in stages[stage]


def _drafts(parts: Sequence[Part], stages: tuple[range, ...], stage: int) -> bool:
    return stage == len(stages) - 1 and any(part.group == "drafting blocks" for part in parts)
