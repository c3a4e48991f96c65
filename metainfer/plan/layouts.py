"""Layouts: how the ranks of a machine share a model, for prefill and for decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from metainfer.core.errors import MetainferError

RELEASED = "released"
"""A format as the checkpoint or the vendor has it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One phase. All are counts of at least 1.

    Attributes:
        replicas: whole copies of the model, each with requests of its own.
        tensor: ranks of a group that divide heads, output groups and vocabulary.
        context: parts into which a prompt's tokens are divided; each part has whole attention
            weights, divided by `tensor` alone.
        pipeline: stages, each with some of the layers.
        expert: parts of a group over which whole experts are dealt out; the width of an expert is
            divided over the `group / expert` ranks of a part. 1: each rank has a slice of every
            expert.
        kv_shards: ranks over which the tokens of a sequence's caches are divided; rings and
            compressor states are on every rank.
    """

    replicas: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    kv_shards: int = 1

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) < 1:
                raise MetainferError(f"a layout has {one.name} = {getattr(self, one.name)}")
        for name in ("expert", "kv_shards"):
            if self.group % getattr(self, name):
                raise MetainferError(
                    f"{name} = {getattr(self, name)} does not divide a group of {self.group} ranks"
                )

    @property
    def group(self) -> int:
        """Ranks that exchange data within each layer: of one stage of one replica."""
        return self.tensor * self.context

    @property
    def gpus(self) -> int:
        return self.replicas * self.group * self.pipeline

    @property
    def expert_slices(self) -> int:
        """Ranks over which the width of one expert is divided."""
        return self.group // self.expert

    @property
    def name(self) -> str:
        """Such as "2 x TP2 PP2", "CP4 EP4", "1 GPU"."""
        parts = [
            f"{short}{value}"
            for short, value in (
                ("TP", self.tensor),
                ("CP", self.context),
                ("PP", self.pipeline),
                ("EP", self.expert),
                ("KV", self.kv_shards),
            )
            if value > 1
        ]
        one = " ".join(parts) or "1 GPU"
        return f"{self.replicas} x {one}" if self.replicas > 1 else one


@dataclass(frozen=True, slots=True)
class Layouts:
    """Of both phases, over one set of weights and caches."""

    prefill: Layout
    decode: Layout

    def __post_init__(self) -> None:
        for name in ("replicas", "pipeline", "group", "expert", "kv_shards"):
            before, after = getattr(self.prefill, name), getattr(self.decode, name)
            if before != after:
                raise MetainferError(
                    f"{name} is {before} in prefill and {after} in decode; weights and caches are"
                    " in one place for both"
                )

    @property
    def gpus(self) -> int:
        return self.decode.gpus

    @property
    def replicates_attention(self) -> bool:
        """A rank keeps more of the attention weights than its share of heads, for prefill."""
        return self.prefill.tensor < self.decode.tensor

    @property
    def name(self) -> str:
        """Such as "2 x CP4 EP4 | TP4": how decode differs stands behind the bar."""
        if self.prefill == self.decode:
            return self.decode.name
        differs = Layout(tensor=self.decode.tensor, context=self.decode.context)
        return f"{self.prefill.name} | {differs.name}"


@dataclass(frozen=True, slots=True)
class Formats:
    """How what is placed is kept, and what is kept where.

    Attributes:
        experts: `RELEASED`, or a format that the routed experts are converted to: "bf16", "fp8",
            "fp4" or "mxfp4" (4 bits, a scale byte per 32), "nvfp4" (a scale byte per 16).
        latents: of caches: `RELEASED` (the model's byte format), "bfloat16", "fp8".
        index_keys: likewise, or "fp4".
        engram: "gpu" (divided over the ranks of a group), "host" or "disk"; no effect for models
            without such tables.
        chunk_rows: rows of the largest prefill step, of a whole group.
        wire: of activations between ranks in prefill: "bf16", "fp8", "int8".
        draft: tokens that the checkpoint's drafting blocks draft of a sequence before each decode
            step; 0: these blocks are not loaded.
        linear: as `experts`, of attention, shared experts and dense layers: "bf16" or "fp8".
    """

    experts: str = RELEASED
    latents: str = RELEASED
    index_keys: str = RELEASED
    engram: str = "host"
    chunk_rows: int = 8192
    wire: str = "bf16"
    draft: int = 0
    linear: str = RELEASED


def layouts_of(gpus: int) -> Iterator[Layouts]:
    """Every pair of layouts over 1 to `gpus` GPUs. Decode divides heads alone; prefill divides
    heads, tokens, or both."""
    for replicas in range(1, gpus + 1):
        for pipeline in range(1, gpus // replicas + 1):
            for group in range(1, gpus // (replicas * pipeline) + 1):
                yield from _of_group(Layout(replicas, group, 1, pipeline))


def _of_group(plain: Layout) -> Iterator[Layouts]:
    group = plain.tensor
    divisors = [part for part in range(1, group + 1) if group % part == 0]
    for expert in divisors:
        for shards in divisors:
            decode = replace(plain, expert=expert, kv_shards=shards)
            for context in divisors:
                prefill = replace(decode, tensor=group // context, context=context)
                yield Layouts(prefill, decode)
