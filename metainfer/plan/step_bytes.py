"""Bytes that rows of a step hold at once, from the widths that one rank computes."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.arch.shapes import ModelShape

PROMPT_LOGITS_BYTES = 64 * 2**20
"""Logits of prompt rows are made in slices of at most so many bytes (but at least one row)."""


@dataclass(frozen=True, slots=True)
class StepWidths:
    """Elements of a row, on one rank.

    Attributes:
        streams: residual streams.
        heads: of queries and results of the rank's heads, in all their forms.
        narrow: of what lies between products: low ranks, latents, grouped outputs, hidden.
        compressed: value and score of what compressors read; fp32.
        index: of index queries; 0 where no layer chooses.
        index_fp32: of index keys as compressors read them, weights of heads, chosen entries.
        expert_share: of the rows of a step that the rank's experts may get, at most 1.
        expert, shared, dense: between the products of a routed expert, of the shared ones and of
            a layer without experts.
    """

    hidden: int
    streams: int
    heads: int
    narrow: int
    compressed: int
    index: int
    index_fp32: int
    experts_per_token: int
    expert_share: float
    expert: int
    shared: int
    dense: int
    vocab: int


EXPERT_SKEW = 2.0
"""Rows for which memory is kept where ranks have whole experts, over an even share of them. More
than that is computed in parts."""


def step_widths(
    shape: ModelShape, tensor: int = 1, expert: int = 1, expert_slices: int = 1
) -> StepWidths:
    """Of one rank.

    Args:
        tensor: ranks that divide heads, output groups, shared experts and dense layers.
        expert, expert_slices: parts over which experts are dealt, ranks of a part.
    """
    side, index = shape.side, shape.side.indexer
    head = side.query_width + side.output_width
    head += side.key_width + side.value_width if side.absorbed else 0
    grouped = -(-side.output_groups // tensor) * side.output_rank
    compresses = any(layer.owns_entries and layer.ratio > 1 for layer in side.layers)
    chooses = bool(side.choosers())
    topk = max((layer.topk for layer in side.layers), default=0)
    keys = 4 * index.width + index.heads + 2 * topk
    return StepWidths(
        hidden=side.hidden_size,
        streams=side.streams.streams if side.streams else 1,
        heads=-(-side.heads // tensor) * head,
        narrow=side.q_rank + side.key_width + grouped + side.hidden_size,
        compressed=4 * side.value_width if compresses else 0,
        index=2 * index.heads * index.width if chooses else 0,
        index_fp32=keys if chooses else 0,
        experts_per_token=shape.experts_per_token,
        expert_share=min(1.0, EXPERT_SKEW / expert),
        expert=-(-shape.expert_width // expert_slices),
        shared=-(-shape.expert_width * shape.shared_experts // tensor),
        dense=-(-shape.dense_width // tensor),
        vocab=shape.vocab_size,
    )


def stream_bytes(widths: StepWidths, rows: int, size: int) -> int:
    """The residual streams: old, new, and a copy in fp32 while they are mixed."""
    return rows * widths.streams * widths.hidden * (2 * size + 4)


def attention_bytes(widths: StepWidths, rows: int, size: int) -> int:
    """Queries and outputs of the heads, latents, index queries, compressor rows, chosen entries."""
    elements = widths.heads + 2 * widths.narrow + widths.index
    return rows * (elements * size + (widths.compressed + widths.index_fp32) * 4)


def experts_bytes(widths: StepWidths, rows: int, size: int) -> int:
    """Rows sorted by expert, their gate and up, and what comes out, in fp32 where it is summed; or
    a dense layer's."""
    per_choice = widths.hidden * (size + 4) + 3 * widths.expert * size
    per_row = 3 * widths.shared * size + 2 * widths.hidden * 4
    chosen = rows * widths.experts_per_token
    most = max(min(chosen, rows), int(chosen * widths.expert_share))
    dense = rows * (3 * widths.dense * size + 2 * widths.hidden * 4)
    return max(most * per_choice + rows * per_row, dense)


def exchange_bytes(widths: StepWidths, rows: int, size: int, sampled: int) -> tuple[int, int]:
    """What ranks hold to exchange sums of rows, with a copy in fp32 in which they are made, and
    parts of logits that are gathered and then laid in order.

    Args:
        sampled: rows that are sampled.
    """
    logits = max(sampled * widths.vocab * 4, PROMPT_LOGITS_BYTES, widths.vocab * 4)
    return rows * widths.hidden * (size + 4), 2 * logits


def logits_bytes(vocab: int, rows: int) -> int:
    """Logits of sampled rows with what sampling makes of them (a changed copy, scaled ones, weights
    of 8 bytes), or a slice of prompt rows with its log-probabilities."""
    sampled = 5 * rows * vocab * 4
    return max(sampled, 2 * max(PROMPT_LOGITS_BYTES, vocab * 4))
