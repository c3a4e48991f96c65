"""How well a model predicts held-out text and finds facts in long prompts, through the engine.

The gate for everything that computes approximately: perplexity over windows of token ids, and
recall of facts hidden at known depths. Data is JSON lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from metainfer.core.errors import MetainferError, UserError
from metainfer.core.events import FinishReason
from metainfer.llm.client import EngineClient
from metainfer.llm.offline import Result, generate
from metainfer.llm.request import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of held-out text. `source` names where it is from."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt that ends where a fact stated `distance` tokens before must be given back."""

    prompt: str
    answer: str
    distance: int


@dataclass(frozen=True, slots=True)
class Score:
    """Summed cross entropy of predicted tokens. `text_bytes` of UTF-8 is what they stand for."""

    nats: float
    tokens: int
    text_bytes: int

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.text_bytes


def total(scores: Iterable[Score]) -> Score:
    """One score for all their tokens."""
    each = list(scores)
    return Score(
        sum(s.nats for s in each), sum(s.tokens for s in each), sum(s.text_bytes for s in each)
    )


def read_documents(path: Path) -> list[Document]:
    """Lines of {"source", "text"}. Raises UserError naming the line that is none."""
    return _read(path, Document, {"source": str, "text": str})


def read_needles(path: Path) -> list[Needle]:
    """Lines of {"prompt", "answer", "distance"}. Raises UserError naming the line that is none."""
    return _read(path, Needle, {"prompt": str, "answer": str, "distance": int})


def read_lines(path: Path) -> list[str]:
    """Raises UserError naming the file and why it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", hint="give a file of JSON lines") from error


def score_windows(client: EngineClient, windows: Sequence[Sequence[int]], text_bytes: int) -> Score:
    """Cross entropy of every token of every window but its first, natural log.

    Args:
        windows: token ids, each of 2 to max_model_len - 1.
        text_bytes: UTF-8 bytes of the text that the predicted tokens stand for.

    Raises:
        MetainferError: a window failed.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    nats, tokens = 0.0, 0
    for result in checked(generate(client, windows, sampling)):
        given = [entry.logprob for entry in result.prompt_logprobs if entry is not None]
        nats -= math.fsum(given)
        tokens += len(given)
    return Score(nats, tokens, text_bytes)


def recalled(
    client: EngineClient, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[bool]:
    """Whether the greedy continuation of each prompt begins with its answer (token ids)."""
    each = [
        SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
        for answer in answers
    ]
    results = checked(generate(client, prompts, each))
    return [
        result.token_ids == tuple(answer) for result, answer in zip(results, answers, strict=True)
    ]


def checked(results: list[Result]) -> list[Result]:
    """The same results. Raises MetainferError if one of them failed."""
    for result in results:
        if result.reason is FinishReason.ERROR:
            raise MetainferError(f"the engine failed: {result.error}")
    return results


def _read(path: Path, record: Callable[..., T], kinds: Mapping[str, type]) -> list[T]:
    records = []
    for n, line in enumerate(read_lines(path), 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {n}: not JSON: {error}") from error
        for name, kind in kinds.items():
            if not isinstance(value, dict) or not isinstance(value.get(name), kind):
                raise UserError(f"{path}, line {n}: no {name} ({kind.__name__})")
        records.append(record(**{name: value[name] for name in kinds}))
    return records
