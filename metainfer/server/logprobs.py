"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metainfer.core.events import TokenLogprob
from metainfer.text.tokenizer import IncrementalDecoder, Tokenizer

_LOWEST = -9999.0  # JSON has no infinity; vLLM writes this number too


def chat_logprobs(
    logprobs: Sequence[TokenLogprob], num_top: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    return {
        "content": [
            {
                **_chat_token(entry.token_id, entry.logprob, tokenizer),
                "top_logprobs": [
                    _chat_token(token_id, logprob, tokenizer)
                    for token_id, logprob in entry.top[:num_top]
                ],
            }
            for entry in logprobs
        ]
    }


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """`choices[].logprobs` of text completions, piece by piece.

    `text_offset` counts characters of the choice's text, so it goes on from piece to piece and
    from an echoed prompt into the completion.
    """

    def __init__(self, num_top: int, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        """The echoed prompt. Its first token has no probability: null."""
        assert len(token_ids) == len(logprobs), "one log-probability per prompt token"
        return self._piece(token_ids, logprobs)

    def generated(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._piece([entry.token_id for entry in logprobs], logprobs)

    def _piece(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(token_id))
        return {
            "tokens": [self._tokenizer.token_text(token_id) for token_id in token_ids],
            "token_logprobs": [entry and max(entry.logprob, _LOWEST) for entry in logprobs],
            "top_logprobs": [entry and self._top(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """By text; of tokens that look alike the likeliest. The token itself is always there."""
        alternatives: dict[str, float] = {}
        for token_id, logprob in (
            *entry.top[: self._num_top],
            (entry.token_id, entry.logprob),
        ):
            alternatives.setdefault(self._tokenizer.token_text(token_id), max(logprob, _LOWEST))
        return alternatives


def joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of `CompletionLogprobs` as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for piece in pieces for item in piece[name]] for name in names}
