"""Flags of `run` and `chat` about what is said; light enough to be read for their help."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.config import flag
from metainfer.core.errors import RequestError, UserError
from metainfer.core.ranges import require_least
from metainfer.llm.request import SamplingParams
from metainfer.text.generation_config import GenerationConfig

MODEL_HELP = "A checkpoint directory; the shipped model if not given"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen; what is not given is the model's own default."""

    temperature: float | None = flag("--temperature", "0 is greedy")
    top_p: float | None = flag("--top-p", "Least set of tokens with this probability", unit="p")
    top_k: int | None = flag("--top-k", "So many of the likeliest tokens; 0 for all")
    min_p: float | None = flag("--min-p", "Tokens of this share of the likeliest one's", unit="p")
    max_tokens: int | None = flag("--max-tokens", "Longest answer", unit="tokens")
    stop: tuple[str, ...] = flag("--stop", "Texts that end the answer", (), many=True)
    seed: int | None = flag("--seed", "Equal seeds give equal answers", aliases=("--random-seed",))

    def __post_init__(self) -> None:
        self.sampling(GenerationConfig())  # what is out of range is so before a model is loaded

    def sampling(self, defaults: GenerationConfig) -> SamplingParams:
        """Raises UserError naming the flag that is out of range."""

        def chosen(given: float | None, default: float) -> float:
            return default if given is None else given

        if not all(self.stop):
            raise UserError("--stop is empty")
        require_least("--max-tokens", self.max_tokens, 1)
        try:
            return SamplingParams(
                temperature=chosen(self.temperature, defaults.temperature),
                top_p=chosen(self.top_p, defaults.top_p),
                top_k=defaults.top_k if self.top_k is None else self.top_k,
                min_p=chosen(self.min_p, defaults.min_p),
                repetition_penalty=defaults.repetition_penalty,
                max_tokens=self.max_tokens,
                seed=self.seed,
            )
        except RequestError as error:
            flag_name = "--" + (error.param or "").replace("_", "-")
            sentence = error.message.removeprefix(error.param or "").strip()
            raise UserError(f"{flag_name} {sentence}") from error
