"""ModelShape: what a cost model has to know of a model, from its config alone.

Attention is the record that kernels go by (`arch.attention`); here are experts, vocabulary,
formats of matrices and, where there are any, n-gram tables and layers that prompts leave out.
Models that are not served yet have one too. Facts: the released configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.arch.attention import AttentionSide
from metainfer.arch.attention_sides import GLM_FAMILY, V32_FAMILY, V41_FAMILY, of_v4
from metainfer.arch.families import arch_from_config, config_of, read_attention
from metainfer.arch.record import WeightFormat
from metainfer.core.errors import CheckpointError

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.53125, "f32": 4.0}
"""Bytes of a number of a matrix: codes and scales. e2m1 in pairs with a scale byte per 32."""


@dataclass(frozen=True, slots=True)
class NgramTables:
    """Rows of tables of n-grams that are added to the streams (Engram).

    Attributes:
        layers: that read a table each.
        rows: of a table that one token reads.
        row_bytes: codes and scales of one.
        outputs, inputs: of the product that follows.
        table_rows: of all tables.
    """

    layers: int
    rows: int
    row_bytes: int
    outputs: int
    inputs: int
    table_rows: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths in elements.

    Attributes:
        name: what the model is called.
        side: its attention.
        vocab: rows of embedding and head.
        experts, selected, shared: routed experts of a layer, those of a row, and shared ones.
        expert_width: channels inside an expert.
        plain_layers, plain_width: first layers with one feed-forward in place of experts.
        linear, expert_format: of matrices: "bf16", "fp8", "fp4" or "f32".
        replays_from: in a prompt, layers from this one on run over its last window alone, but for
            the entries that this one writes; None where all rows go through all layers.
        tables: n-gram tables, if any.
        expert_block: least channels of an expert that may stand alone.
    """

    name: str
    side: AttentionSide
    vocab: int
    experts: int
    selected: int
    shared: int
    expert_width: int
    plain_layers: int
    plain_width: int
    linear: str
    expert_format: str
    replays_from: int | None = None
    tables: NgramTables | None = None
    expert_block: int = 1

    @property
    def num_layers(self) -> int:
        return len(self.side.layers)

    @property
    def streams(self) -> int:
        return self.side.streams.streams if self.side.streams else 1


def read_shape(path_or_name: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape of a checkpoint directory, a config.json file, or a known name.

    Raises UserError, CheckpointError: as `arch.families.read_arch`.
    """
    side = read_attention(path_or_name)
    config = config_of(path_or_name, overrides)
    if side.family == V41_FAMILY:
        return _v41(side, config["text_config"])
    if side.family in (V32_FAMILY, GLM_FAMILY):
        return _mla(side, config)
    return _v4(config, side.name)


def _v4(config: Mapping[str, Any], name: str) -> ModelShape:
    arch = arch_from_config(config, name)
    formats = {
        WeightFormat.F32: "f32",
        WeightFormat.BF16: "bf16",
        WeightFormat.FP8_BLOCK: "fp8",
        WeightFormat.FP4_GROUP: "fp4",
    }
    stored = arch.quantisation
    blocks = {WeightFormat.FP8_BLOCK: max(stored.fp8_block), WeightFormat.FP4_GROUP: 32}
    return ModelShape(
        name=name,
        side=of_v4(arch),
        vocab=arch.vocab_size,
        experts=arch.num_experts,
        selected=arch.experts_per_token,
        shared=arch.num_shared_experts,
        expert_width=arch.moe_intermediate_size,
        plain_layers=0,
        plain_width=0,
        linear=formats[stored.linear],
        expert_format=formats[stored.experts],
        expert_block=blocks.get(stored.experts, 1),
    )


def _v41(side: AttentionSide, text: Mapping[str, Any]) -> ModelShape:
    integers = _Integers(text, side.name)
    count = len(integers.many("engram_layer_ids"))
    heads, longest = integers.one("engram_n_heads"), integers.one("engram_max_ngram_size")
    width = integers.one("engram_head_dim")
    rows = heads * (longest - 1)  # n-grams of 2 to the longest
    streams = side.streams.streams if side.streams else 1
    tables = NgramTables(
        layers=count,
        rows=rows,
        row_bytes=width + width // 32,
        outputs=(streams + 1) * side.hidden_size,  # a key per stream and one value
        inputs=rows * width,
        table_rows=sum(integers.many("engram_num_embeddings")),
    )
    return ModelShape(
        name=side.name,
        side=side,
        vocab=integers.one("vocab_size"),
        experts=integers.one("n_routed_experts"),
        selected=integers.one("num_experts_per_tok"),
        shared=integers.one("n_shared_experts"),
        expert_width=integers.one("moe_intermediate_size"),
        plain_layers=0,
        plain_width=0,
        linear="fp8",
        expert_format="fp4" if text.get("expert_dtype") == "fp4" else "fp8",
        # From the last source of entries on, rows see their window and its entries alone.
        replays_from=max(integers.many("kv_source_layer_ids")),
        tables=tables if count else None,
        expert_block=32,
    )


def _mla(side: AttentionSide, config: Mapping[str, Any]) -> ModelShape:
    integers = _Integers(config, side.name)
    stored = "fp8" if config.get("quantization_config") else "bf16"
    return ModelShape(
        name=side.name,
        side=side,
        vocab=integers.one("vocab_size"),
        experts=integers.one("n_routed_experts"),
        selected=integers.one("num_experts_per_tok"),
        shared=integers.one("n_shared_experts"),
        expert_width=integers.one("moe_intermediate_size"),
        plain_layers=integers.one("first_k_dense_replace"),
        plain_width=integers.one("intermediate_size"),
        linear=stored,
        expert_format=stored,
        expert_block=128 if stored == "fp8" else 1,
    )


class _Integers:
    """Integers of a config, by key."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config = config
        self._name = name

    def one(self, key: str) -> int:
        value = self._config.get(key)
        if type(value) is not int or value < 0:
            raise CheckpointError(f"the config of {self._name} has {key} = {value!r}, no count")
        return value

    def many(self, key: str) -> tuple[int, ...]:
        value = self._config.get(key)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise CheckpointError(f"the config of {self._name} has {key} = {value!r}, no counts")
        return tuple(value)
