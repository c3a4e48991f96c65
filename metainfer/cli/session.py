"""Talking with an engine in this process: what `run` and `chat` share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from metainfer.core.config import flag
from metainfer.core.errors import RequestError, UserError
from metainfer.core.events import GenerationEnd, TextEvent
from metainfer.llm.client import EngineClient
from metainfer.llm.dispatch import Call, Dispatcher
from metainfer.llm.generation import Generation, TextOptions
from metainfer.llm.request import Request, SamplingParams
from metainfer.text.chat import ChatEncoder, ChatPrompt
from metainfer.text.generation_config import GenerationConfig
from metainfer.text.tokenizer import Tokenizer


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

    def sampling(self, defaults: GenerationConfig) -> SamplingParams:
        """Raises UserError naming the flag that is out of range."""

        def chosen(given: float | None, default: float) -> float:
            return default if given is None else given

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


class Session:
    """One user of one engine. Close it when done; the engine itself stays.

    Attributes:
        tokenizer, defaults: of the model.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        defaults: GenerationConfig,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._eos_token_ids = tuple(eos_token_ids)
        self._dispatcher = Dispatcher(client)
        self._encoder: ChatEncoder | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._dispatcher.close()

    def chat_prompt(
        self, messages: Sequence[Mapping[str, str]], thinking: bool | None
    ) -> ChatPrompt:
        """Raises UserError if the model cannot chat."""
        if self._encoder is None:
            self._encoder = ChatEncoder(self.tokenizer, self.defaults.thinking)
        return self._encoder.encode(messages, thinking=thinking)

    def answer(
        self, prompt: ChatPrompt | Sequence[int], options: SamplingOptions
    ) -> Iterator[TextEvent]:
        """The answer as it comes, to a conversation or to plain tokens; GenerationEnd is last.
        Leaving the iterator early aborts the request."""
        if isinstance(prompt, ChatPrompt):
            token_ids, parser = prompt.token_ids, prompt.parser()
        else:
            token_ids, parser = tuple(prompt), None
        request = Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling=options.sampling(self.defaults),
            arrival_s=time.monotonic(),
        )
        generation = Generation(
            request,
            self.tokenizer,
            self._eos_token_ids,
            TextOptions(stop=options.stop),
            parser,
        )
        with closing(Call(self._dispatcher, [generation])) as call:
            call.open()
            for _, event in call.iterate():
                if isinstance(event, GenerationEnd) and event.error is not None:
                    raise UserError(event.error)
                yield event
