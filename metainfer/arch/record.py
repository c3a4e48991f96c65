"""The Arch record: what planner, loader and model need to know of a model, read once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from metainfer.core.dtypes import DType


class LayerKind(StrEnum):
    """The three kinds of attention layer in DeepSeek-V4."""

    SLIDING = "sliding"  # window only
    COMPRESSED_SPARSE = "compressed_sparse"  # CSA: entries per 4 tokens, chosen by the indexer
    HEAVILY_COMPRESSED = "heavily_compressed"  # HCA: entries per 128 tokens, all visible ones


class RouterKind(StrEnum):
    """How a layer chooses its experts."""

    HASH = "hash"  # a table from token id to expert ids
    LEARNED = "learned"


class WeightFormat(StrEnum):
    """How a group of matrices is stored in the checkpoint."""

    F32 = "f32"
    BF16 = "bf16"
    FP8_BLOCK = "fp8_block"  # e4m3 codes, one scale per block of rows x columns
    FP4_GROUP = "fp4_group"  # e2m1 codes in pairs, one e8m0 scale per 32 columns
    NVFP4 = "nvfp4"  # e2m1 codes in pairs, one e4m3 scale per 16 columns, one fp32 for all


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN parameters of the rotary embedding in layers that compress."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How matrices are stored. Scales of the fp8 format are e8m0 bytes or fp32 numbers."""

    linear: WeightFormat  # attention, indexer queries, shared experts
    experts: WeightFormat  # routed experts
    fp8_block: tuple[int, int] = (128, 128)
    fp8_scale_dtype: DType = DType.F8_E8M0
    fp4_group: int = 32


@dataclass(frozen=True, slots=True)
class LayerArch:
    """One decoder layer. `ratio` is tokens per compressed entry, 0 where nothing is compressed."""

    index: int
    kind: LayerKind
    ratio: int
    router: RouterKind


@dataclass(frozen=True, slots=True)
class Arch:
    """A DeepSeek-V4-class architecture; widths in elements, contexts in tokens."""

    family: str  # "deepseek_v4"
    name: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerArch, ...]
    num_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    swiglu_limit: float
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling | None
    max_model_len: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    quantisation: Quantisation
    num_mtp_layers: int  # MTP blocks in the checkpoint; recognised, not used
    num_dspark_stages: int = 0  # stages of the DSpark revision's drafter; recognised, not used

    @property
    def num_layers(self) -> int:
        return len(self.layers)
