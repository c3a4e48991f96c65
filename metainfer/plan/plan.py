"""Plan: every choice made before the first request, with its origin and reason.

Frozen and versioned; JSON both ways; printed at start and served at /plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.arch.stages import Stage, place_of, stage_of
from metainfer.core.errors import UserError
from metainfer.ops.cache_formats import PLAIN

PLAN_VERSION = 1

T = TypeVar("T")


class Origin(StrEnum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    FILE = "file"
    MEASURED = "measured"
    MODEL = "model"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Value(Generic[T]):
    """A chosen value, who chose it, and why in one sentence."""

    value: T
    origin: Origin
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices of an engine. Bytes are bytes of one rank, lengths are tokens.

    Attributes:
        device: "cpu", or such as "cuda:0"; of several ranks that of the first (`of_rank`).
        code_for: the older GPU whose code runs there, such as "sm_89"; else "native".
        compute_dtype: "float32" or "bfloat16": activations and matrix products.
        activations: "plain", or "fp8": rounded to e4m3 groups before products with quantised
            matrices.
        shared_expert_stream: "on": the shared expert runs on a stream beside the routed ones;
            "off"; or, such as "64", only in steps of so many rows at most.
        cache_dtype: format of the caches of latents and entries, "float32", "bfloat16" or "fp8".
        index_cache_dtype: format of index keys: one of these, or "fp4".
        tensor_parallel_size: ranks that share the model, or the layers of each stage.
        prefill_context_parallel_size: of these, how many share the tokens of long prefills.
        decode_context_parallel_size: of these, over how many the growing caches are divided.
        expert_parallel_size: parts of these ranks over which whole experts are dealt; 1: each rank
            has a slice of every expert.
        pipeline_parallel_size: stages, each with some of the layers.
        collectives: what carries their sums (`plan.ranks`).
        collective_ways: which way each collective of the ranks of a stage takes, by bytes and phase
            (`plan.routes.Router.of_words`).
        wire_dtype: in which form sums of prefill travel between ranks (`plan.wires`).
        max_model_len: longest sequence, prompt and output together.
        max_num_seqs: sequences that run at once; each owns one state slot.
        max_num_batched_tokens: rows per step; longer prompts are prefilled in chunks.
        max_queued_requests: requests that may wait beyond max_num_seqs; more are refused.
        num_blocks: blocks of the growing cache kinds (`block_tokens` tokens each).
        draft_rows: extra ring rows for speculation (0: off).
        weights_residency: "quantised" (as stored) or "expanded" (unpacked once, without loss).
        weights_bytes, state_bytes, blocks_bytes, activation_bytes: the memory ledger.
        exchange_bytes: of it, what a step holds to read parts of caches that other ranks keep.
        kernel_order: backends in order of preference, "op=backend,backend;op=..."; "" = default.
        tuned_kernels: "on": of the backends of the order those run that were measured to be fastest
            on this card, where any were; "off": the first.
        cuda_graphs: "on" or "off": whether decode steps are captured as graphs.
        cuda_graph_sizes: rows of decode steps of fixed shapes, ascending; () where steps take the
            shapes that they have.
        cuda_graph_contexts: longest contexts of such steps in tokens, ascending.
        graphs_bytes: of the memory ledger: what such steps take beside all that is above.
        async_scheduling: "on": a step is launched before results of the one before are read.
        decode_share: share of the time for steps of decoding alone while prompts wait.
        longest_prefill_s: seconds that a step with rows of prompts may take while others decode.
        threads: CPU threads of one step on one rank (0 on an accelerator).
    """

    device: Value[str]
    code_for: Value[str]
    compute_dtype: Value[str]
    activations: Value[str]
    shared_expert_stream: Value[str]
    cache_dtype: Value[str]
    index_cache_dtype: Value[str]
    tensor_parallel_size: Value[int]
    prefill_context_parallel_size: Value[int]
    decode_context_parallel_size: Value[int]
    expert_parallel_size: Value[int]
    pipeline_parallel_size: Value[int]
    collectives: Value[str]
    collective_ways: Value[str]
    wire_dtype: Value[str]
    max_model_len: Value[int]
    max_num_seqs: Value[int]
    max_num_batched_tokens: Value[int]
    max_queued_requests: Value[int]
    num_blocks: Value[int]
    draft_rows: Value[int]
    weights_residency: Value[str]
    weights_bytes: Value[int]
    state_bytes: Value[int]
    blocks_bytes: Value[int]
    activation_bytes: Value[int]
    exchange_bytes: Value[int]
    kernel_order: Value[str]
    tuned_kernels: Value[str]
    cuda_graphs: Value[str]
    cuda_graph_sizes: Value[tuple[int, ...]]
    cuda_graph_contexts: Value[tuple[int, ...]]
    graphs_bytes: Value[int]
    async_scheduling: Value[str]
    decode_share: Value[float]
    longest_prefill_s: Value[float]
    threads: Value[int]

    @property
    def plain_cache_dtype(self) -> str:
        """Format of the caches that hold plain numbers, or would."""
        dtypes = (self.cache_dtype, self.index_cache_dtype, self.compute_dtype)
        return plain_dtype(*(dtype.value for dtype in dtypes))

    @property
    def block_tokens(self) -> int:
        """Of one of `num_blocks`: BLOCK_TOKENS on each rank that divides a sequence's caches."""
        return BLOCK_TOKENS * self.decode_context_parallel_size.value

    @property
    def ranks(self) -> int:
        """Of all stages."""
        return self.tensor_parallel_size.value * self.pipeline_parallel_size.value

    def place_of(self, rank: int, layers: int) -> tuple[Stage, int]:
        """The stage of a rank, of a model of so many layers, and its place in that stage."""
        stages = self.pipeline_parallel_size.value
        number, place = place_of(rank, self.ranks, stages)
        return stage_of(number, stages, layers), place

    @property
    def steps_ahead(self) -> int:
        """Steps that are launched before the results of the first are read, beside it."""
        return self.pipeline_parallel_size.value - (self.async_scheduling.value == "off")

    def of_rank(self, rank: int) -> Plan:
        """As one rank reads it: with its own device."""
        kind, _, first = self.device.value.partition(":")
        if not first or rank == 0:
            return self
        device = replace(self.device, value=f"{kind}:{int(first) + rank}")
        return replace(self, device=device)

    def items(self) -> Iterator[tuple[str, Value[Any]]]:
        for f in fields(self):
            yield f.name, getattr(self, f.name)

    def to_json(self) -> str:
        values = {
            name: {"value": v.value, "origin": v.origin.value, "reason": v.reason}
            for name, v in self.items()
        }
        return json.dumps({"version": PLAN_VERSION, "values": values}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises UserError naming what is unknown, missing or of another version."""
        try:
            record = json.loads(text)
            version, values = record["version"], dict(record["values"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError("the plan is not a JSON plan record", hint=str(error)) from error
        if version != PLAN_VERSION:
            raise UserError(f"the plan has version {version}, this engine reads {PLAN_VERSION}")
        names = {f.name for f in fields(cls)}
        for word, odd in (("unknown", set(values) - names), ("missing", names - set(values))):
            if odd:
                raise UserError(f"{word} plan values: {', '.join(sorted(odd))}")
        read: dict[str, Value[Any]] = {}
        for name, value in values.items():
            try:
                read[name] = Value(
                    _frozen(value["value"]), Origin(value["origin"]), value["reason"]
                )
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"the plan's {name} is no value with its origin and its reason"
                ) from error
        return cls(**read)


def plain_dtype(*dtypes: str) -> str:
    """The first of some formats that is one of plain numbers."""
    return next(dtype for dtype in dtypes if dtype in PLAIN)


def _frozen(value: Any) -> Any:
    """Lists of JSON are tuples of a plan."""
    return tuple(value) if isinstance(value, list) else value
