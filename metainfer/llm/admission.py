"""Admission: requests that can never be served are refused at once, with the numbers. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from metainfer.arch.cache_kinds import BLOCK_TOKENS, blocks_for
from metainfer.core.errors import RequestError
from metainfer.core.units import format_count
from metainfer.llm.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds requests and steps. Lengths in tokens.

    Attributes:
        max_num_batched_tokens: rows per step, at least 2: prefill and decode each need one.
        max_queued_requests: requests that may wait beyond max_num_seqs.
        draft_rows: rows of a decoding sequence beyond the first.
        block_tokens: of one of the `num_blocks`, on all ranks that divide a sequence's caches.
        stages: of a pipeline, which are at work on different sequences, or chunks of a prompt.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    num_blocks: int
    draft_rows: int = 0
    block_tokens: int = BLOCK_TOKENS
    stages: int = 1


def max_total_tokens(request: Request, limits: Limits) -> int:
    """Prompt and output together at most: max_tokens, clamped to the context."""
    max_tokens = request.sampling.max_tokens
    if max_tokens is None:
        return limits.max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, limits.max_model_len)


def check_request(request: Request, limits: Limits) -> None:
    """Raise RequestError if `request` can never be served under `limits`."""
    sampling = request.sampling
    prompt = len(request.prompt_token_ids)
    if prompt == 0:
        raise RequestError("the prompt is empty", param="prompt", code="empty_prompt")
    _check_length(prompt, sampling.max_tokens, limits)
    _check_tokens("prompt", request.prompt_token_ids, limits.vocab_size)
    _check_tokens("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    _check_tokens("logit_bias", sampling.logit_bias, limits.vocab_size)
    if sampling.allowed_token_ids is not None:
        if not sampling.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty: no token could be generated",
                param="allowed_token_ids",
                code="invalid_value",
            )
        _check_tokens("allowed_token_ids", sampling.allowed_token_ids, limits.vocab_size)
        ends = {*limits.eos_token_ids, *sampling.stop_token_ids}
        if sampling.min_tokens > 0 and ends.issuperset(sampling.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids holds only tokens that end the output, and min_tokens"
                f" {sampling.min_tokens} forbids these at first: no token could be generated",
                param="allowed_token_ids",
                code="invalid_value",
                hint="allow another token, or leave out min_tokens",
            )
    # The last token is never computed: nothing follows it.
    total = max_total_tokens(request, limits)
    needed = blocks_for(max(total - 1, prompt), limits.block_tokens)
    if needed > limits.num_blocks:
        raise RequestError(
            f"a prompt of {format_count(prompt)} tokens with {format_count(total - prompt)} tokens"
            f" of output needs {needed} cache blocks of {limits.block_tokens} tokens, and there are"
            f" {limits.num_blocks}",
            param="max_tokens",
            code="context_length_exceeded",
            hint="ask for fewer tokens, or start the engine with more --num-blocks",
        )


def _check_length(prompt: int, max_tokens: int | None, limits: Limits) -> None:
    if prompt + (max_tokens != 0) > limits.max_model_len:
        raise RequestError(
            f"the prompt has {format_count(prompt)} tokens and the longest sequence, with at least"
            f" one token of output, is {format_count(limits.max_model_len)} tokens",
            param="prompt",
            code="context_length_exceeded",
            hint="shorten the prompt, or start the engine with a larger --max-model-len if the"
            " model allows it",
        )


def _check_tokens(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise RequestError(
        f"{param} has token id {wrong}, and the vocabulary has ids 0 to {vocab_size - 1}",
        param=param,
        code="invalid_token_id",
    )
