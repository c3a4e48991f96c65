"""Talking with an engine in this process: what `run` and `chat` share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from metainfer.arch.families import read_arch
from metainfer.cli.sampling import SamplingOptions
from metainfer.cli.terminal import Terminal
from metainfer.core.errors import CheckpointError, RequestError, UserError
from metainfer.core.events import GenerationEnd, TextEvent
from metainfer.llm.client import EngineClient
from metainfer.llm.dispatch import Call, Dispatcher
from metainfer.llm.generation import Generation, TextOptions
from metainfer.llm.request import Request, SamplingParams
from metainfer.plan.settings import EngineSettings, LoadFormat
from metainfer.shipped import model_dir
from metainfer.text.chat import ChatEncoder, ChatPrompt
from metainfer.text.generation_config import GENERATION_CONFIG_FILE, GenerationConfig
from metainfer.text.tokenizer import TOKENIZER_FILE, Tokenizer


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
    ) -> Generator[TextEvent, None, None]:
        """The answer as it comes, to a conversation or to plain tokens; GenerationEnd is last.
        Leaving the iterator early aborts the request.

        Raises RequestError if it cannot be served, UserError if the engine fails.
        """
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
            request, self.tokenizer, self._eos_token_ids, TextOptions(stop=options.stop), parser
        )
        with closing(Call(self._dispatcher, [generation])) as call:
            call.open()
            for _, event in call.iterate():
                if isinstance(event, GenerationEnd) and event.error is not None:
                    raise UserError(event.error)
                yield event


@contextmanager
def open_session(
    terminal: Terminal, model: str | None, settings: EngineSettings
) -> Iterator[Session]:
    """A session with the model in a directory, the shipped one where None is named.

    Raises UserError, before anything is loaded, if the tokenizer does not fit the model.
    """
    from metainfer.llm.engine import Engine, model_source

    directory = model_source(model_dir(model), settings)
    tokenizer, defaults = read_text_side(directory, settings)
    with terminal.progress("loading") as progress:
        engine = Engine.load(directory, settings, progress.update)
    with engine, Session(engine, tokenizer, engine.arch.eos_token_ids, defaults) as session:
        yield session


def read_text_side(directory: Path, settings: EngineSettings) -> tuple[Tokenizer, GenerationConfig]:
    """Tokenizer and defaults of a checkpoint. Raises UserError if they do not fit the model, or
    if no request could be sampled by those defaults."""
    arch = read_arch(directory, settings.hf_overrides)
    if settings.load_format == LoadFormat.DUMMY and not (directory / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{directory} has no {TOKENIZER_FILE}: a model of random weights reads and writes text"
            " by the tokenizer of its directory",
            hint="copy a tokenizer next to its config.json; `metainfer bench stages` and `bench"
            " paired` need none",
        )
    tokenizer = Tokenizer.load(directory)
    tokenizer.check_fits(arch.vocab_size, arch.bos_token_id, arch.eos_token_ids)
    defaults = GenerationConfig.load(directory)
    try:
        SamplingParams(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )
    except RequestError as error:
        raise CheckpointError(f"{directory / GENERATION_CONFIG_FILE}: {error.message}") from error
    return tokenizer, defaults
