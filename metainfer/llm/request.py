"""Requests as the engine knows them: token ids in, sampling parameters, and their status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from metainfer.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings follow vLLM's.

    Attributes:
        temperature: 0 means greedy.
        top_k: 0 or -1 means all tokens.
        seed: None draws one per request; equal seeds give equal tokens on one machine.
        max_tokens: None means as many as the context holds.
        min_tokens: no end-of-text token and no stop token before that many tokens.
        stop_token_ids: end the output; the stop token itself is reported in the FinishEvent.
        ignore_eos: go on past the model's end-of-text tokens.
        logit_bias: token id -> number added to its logit, -100 to 100.
        allowed_token_ids: if given, all others are masked.
        logprobs: None for none, else how many alternatives to report beside the sampled token.
        prompt_logprobs: None for none, else how many alternatives per prompt token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1")
        _require(self.top_k >= -1, "top_k", "must be -1, 0 (all tokens) or positive")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must fit in 64 bits")
        _require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "must be >= 0")
        _require(self.min_tokens >= 0, "min_tokens", "must be >= 0")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must be at most max_tokens",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, "must be between -2 and 2")
        # Logits divided by much less would be infinite.
        _require(
            0.01 <= self.repetition_penalty <= 100.0,
            "repetition_penalty",
            "must be between 0.01 and 100",
        )
        for bias in self.logit_bias.values():
            _require(-100.0 <= bias <= 100.0, "logit_bias", "values must be between -100 and 100")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= 20, name, "must be between 0 and 20")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to generate. Prompts are token ids; text stays above the engine.

    Attributes:
        priority: lower is served earlier; equal priorities are served in order of arrival.
        arrival_s: `time.monotonic()` at submission.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0


def _require(holds: bool, param: str, what: str) -> None:
    if not holds:
        raise RequestError(f"{param} {what}", param=param, code="invalid_value")
