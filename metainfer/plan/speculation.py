"""Speculation: what a decode step gains where blocks of the checkpoint draft tokens for it.

A step then computes the sequence's own row and a row for each drafted token, and all tokens up to
the first that the model would not have chosen count. What is said does not change, so it needs no
proof of quality; how many count depends on the text.
"""

from __future__ import annotations

import math
from dataclasses import replace

from metainfer.arch.shapes import ModelShape
from metainfer.core.errors import UserError
from metainfer.plan.cost.parts import HEAD
from metainfer.plan.cost.phases import Item, Phases, Step
from metainfer.plan.cost.predict import Prediction, wait_s
from metainfer.plan.layouts import Formats, Layouts
from metainfer.plan.workload import Workload

ACCEPTED = 0.75
"""Share of drafted tokens that count, each if those before it did. Inferred from what drafting
gained at one sequence: two tokens 1.7 times (V4-Flash, vLLM 41834) and 2.1 times (b12x), three
tokens 2.1 times (GLM-5.2), a block of V4.1's 2.2 times with prose, more with code."""
_SPREAD = 0.1
"""One standard deviation of that between texts."""
_MOST = 8
_TRIED = (1, 2, 3)


def drafts_a_block(shape: ModelShape) -> bool:
    """Whether all tokens of a draft come out of one pass; otherwise each takes one of its own."""
    return shape.draft is not None and shape.draft.markov_rank > 0


def draft_counts(shape: ModelShape) -> tuple[int, ...]:
    """Tokens to draft that are worth trying; () without drafting blocks."""
    if shape.draft is None:
        return ()
    return (shape.draft.rows,) if drafts_a_block(shape) else _TRIED


def most_drafted(shape: ModelShape) -> int:
    """Tokens that drafting blocks give at a time; longer chains of them are not planned for."""
    return shape.draft.rows if shape.draft is not None and drafts_a_block(shape) else _MOST


def check_draft(shape: ModelShape, tokens: int) -> None:
    """Raises UserError where the model cannot draft so many."""
    if tokens and shape.draft is None:
        raise UserError(
            f"{shape.name} has no drafting blocks, so {tokens_text(tokens)} cannot be drafted",
            hint="leave --num-speculative-tokens out, or give 0",
        )
    most = most_drafted(shape)
    if not 0 <= tokens <= most:
        raise UserError(
            f"--num-speculative-tokens {tokens} is not 0 to {most}",
            hint=f"the drafting blocks of {shape.name} are planned for at most {most} at a time",
        )


def tokens_text(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def tokens_a_step(drafted: int, accepted: float = ACCEPTED) -> float:
    """That a sequence gains in a step, its own one among them."""
    return sum(accepted**place for place in range(drafted + 1))


def speculated(
    phases: Phases, layouts: Layouts, formats: Formats, workload: Workload, plain: Prediction
) -> Prediction:
    """`plain`, which is without drafting, with as many tokens a step as `formats` has; of layouts
    without stages, where the last one would draft for the first."""
    shape, layout, drafted = phases.shape, layouts.decode, formats.draft
    if not drafted or shape.draft is None:
        return plain
    batch = math.ceil(workload.requests_at_once / layout.replicas)
    seen = workload.mean_context
    items = list(phases.decode(layout, formats, batch * (1 + drafted), seen).items)
    passes, rows = (1, batch * drafted) if drafts_a_block(shape) else (drafted, batch)
    one = phases.decode(layout, formats, rows, seen)
    part = shape.draft.blocks / shape.num_layers
    items += [_times(item, passes * (1.0 if item.group == HEAD else part)) for item in one.items]
    decode = Step(tuple(items))
    tpot_s = decode.seconds / tokens_a_step(drafted)
    # Blocks that see whole contexts keep entries of every token of a prompt.
    longer = 1.0 if shape.side.window else 1.0 + part
    prompt_s = workload.input_tokens * layouts.prefill.replicas / plain.input_per_s * longer
    request_s = prompt_s + workload.output_tokens * tpot_s / batch
    busy = min(layout.replicas, workload.requests_at_once)
    load = plain.load
    if workload.request_rate_per_s is not None:
        load = workload.request_rate_per_s * request_s / layout.replicas
    spread = (
        tokens_a_step(drafted, ACCEPTED + _SPREAD) - tokens_a_step(drafted, ACCEPTED - _SPREAD)
    ) / (2.0 * tokens_a_step(drafted))
    return replace(
        plain,
        input_per_s=plain.input_per_s / longer,
        ttft_s=plain.idle_ttft_s * longer + wait_s(workload, layout.replicas, prompt_s, load),
        idle_ttft_s=plain.idle_ttft_s * longer,
        tpot_s=tpot_s,
        output_per_s=plain.output_per_s * plain.tpot_s / tpot_s,
        requests_per_s=busy / request_s,
        decode_error=math.hypot(decode.uncertainty(phases.constants), spread),
        prefill=Step(tuple(_times(item, longer) for item in plain.prefill.items)),
        decode=decode,
        load=load,
    )


def _times(item: Item, count: float) -> Item:
    return replace(item, seconds=item.seconds * count)
