"""Flags of this engine that say a layout, and what of a layout none of them says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from metainfer.core.config import flags_of
from metainfer.plan.layouts import RELEASED, Formats, Layouts
from metainfer.plan.settings import EngineSettings
from metainfer.plan.speculation import tokens_text

AXES = (
    "tensor_parallel_size",
    "prefill_context_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "expert_parallel_size",
)
"""Fields of EngineSettings that divide the model, in the order of a command line."""

_KNOWN = frozenset(field.name for field in fields(EngineSettings))


def axes_of(layouts: Layouts) -> dict[str, int]:
    """What each of `AXES` is in a layout, of one replica."""
    layout = layouts.decode
    return {
        "tensor_parallel_size": layout.group,
        "prefill_context_parallel_size": layouts.prefill.context,
        "pipeline_parallel_size": layout.pipeline,
        "decode_context_parallel_size": layout.kv_shards,
        "expert_parallel_size": layout.expert,
    }


def sizes_of(formats: Formats, longest_context: int, requests: int) -> dict[str, Any]:
    """Fields of EngineSettings beside the layout.

    Args:
        longest_context: tokens of a sequence.
        requests: of one server at once.
    """
    latents, keys = formats.latents, formats.index_keys
    if latents == RELEASED:
        latents = "fp8"  # which is what this engine keeps of released bytes
    sizes = {
        "max_model_len": longest_context,
        "max_num_seqs": requests,
        "max_num_batched_tokens": formats.chunk_rows,
        "kv_cache_dtype": latents,
    }
    if formats.wire != "bf16":
        sizes["wire_dtype"] = formats.wire
    return sizes if keys in (RELEASED, latents) else {**sizes, "index_cache_dtype": keys}


def has_flag(axis: str) -> bool:
    """Whether this version runs it."""
    return axis in _KNOWN


def not_run(layouts: Layouts) -> Iterator[str]:
    """Sentences: what of a layout's division this version does not run."""
    layout = layouts.decode
    words = {
        "pipeline_parallel_size": f"layers in {layout.pipeline} stages",
        "decode_context_parallel_size": f"caches of decoding divided over {layout.kv_shards} ranks",
        "expert_parallel_size": f"experts dealt over {layout.expert} parts of a group",
    }
    for axis, value in axes_of(layouts).items():
        if value > 1 and not has_flag(axis):
            yield f"{words[axis]}, which this version does not run"


def not_done(formats: Formats) -> Iterator[str]:
    """Sentences: what of a plan's formats this version does not do, beside its layout."""
    if formats.draft:
        yield f"drafting {tokens_text(formats.draft)}, which this version does not do"
    yield from converted(formats)


def converted(formats: Formats) -> Iterator[str]:
    """Sentences: what a checkpoint must have that is not the released one."""
    for name, form in (("experts", formats.experts), ("other matrices", formats.linear)):
        if form != RELEASED:
            yield f"{name} in {form}: name a checkpoint that has them so"


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Words of a command line for fields of EngineSettings; what needs none is left out."""
    names = {bound.field_name: bound.flag.name for bound in flags_of(EngineSettings)}
    words: list[str] = []
    for field, value in settings.items():
        if field not in AXES or value > 1:
            words += [names[field], str(value)]
    return words
