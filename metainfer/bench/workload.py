"""Prompts that were never sent before, of a wanted length, from a seed.

Lengths are wanted in tokens but made of words: how many tokens a word is, the server is asked
once (`Calibration`); what is reported are the server's own counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from metainfer.core.errors import UserError

_ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "st", "tr")
_VOWELS = ("a", "e", "i", "o", "u", "ea", "ou")
_CODAS = ("", "n", "r", "s", "t", "l", "nd")
_MOST_TEXT_BYTES = 1 << 30


class Source(Protocol):
    """Where the words of prompts come from. No passage is given twice."""

    def passage(self, num_words: int) -> str:
        """A text of `num_words` words. Raises UserError if there are no more."""


class RandomWords:
    """Words that do not exist, different from the first word on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = 0
        self._seed = seed

    def passage(self, num_words: int) -> str:
        self._count += 1
        first = f"{self._seed}-{self._count}"  # no two passages share even their first tokens
        return " ".join([first, *(self._word() for _ in range(num_words - 1))])

    def _word(self) -> str:
        choice = self._random.choice
        syllables = self._random.randint(1, 2)
        return "".join(choice(_ONSETS) + choice(_VOWELS) + choice(_CODAS) for _ in range(syllables))


class TextPassages:
    """Passages of a text file that follow one another and never overlap, from a seeded start."""

    def __init__(self, path: Path, seed: int) -> None:
        if path.stat().st_size > _MOST_TEXT_BYTES:
            raise UserError(f"{path} is larger than 1 GiB", hint="cut it down")
        try:
            self._words = path.read_text(encoding="utf-8").split()
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
        if not self._words:
            raise UserError(f"{path} holds no words")
        self._path = path
        start = random.Random(seed).randrange(len(self._words))
        self._words = self._words[start:] + self._words[:start]
        self._next = 0

    def passage(self, num_words: int) -> str:
        end = self._next + num_words
        if end > len(self._words):
            raise UserError(
                f"{self._path} has {len(self._words)} words, too few for prompts without repeats",
                hint="ask for fewer or shorter prompts, or give a longer text",
            )
        passage, self._next = self._words[self._next : end], end
        return " ".join(passage)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Prompt tokens as the server counts them: `fixed` + `per_word` * words."""

    fixed: float
    per_word: float

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> Calibration:
        """From two (words, tokens) pairs."""
        (words_a, tokens_a), (words_b, tokens_b) = first, second
        per_word = max((tokens_b - tokens_a) / (words_b - words_a), 0.1)
        return cls(max(tokens_a - per_word * words_a, 0.0), per_word)

    def words_for(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the load."""

    prompt: str
    max_tokens: int


def make_asks(
    source: Source,
    calibration: Calibration,
    seed: int,
    count: int,
    lengths: tuple[int, int],
    range_ratio: float,
) -> list[Ask]:
    """`count` requests with prompts and answers around `lengths` = (input, output) tokens."""
    generator = random.Random(seed)
    asks = []
    for _ in range(count):
        num_input, num_output = (_around(generator, length, range_ratio) for length in lengths)
        asks.append(Ask(source.passage(calibration.words_for(num_input)), num_output))
    return asks


def arrival_times_s(seed: int, rate_per_s: float, burstiness: float) -> Iterator[float]:
    """When each request arrives, from 0 on; gaps follow a gamma distribution of that shape."""
    generator = random.Random(seed)
    now_s = 0.0
    while True:
        yield now_s
        if rate_per_s != float("inf"):
            now_s += generator.gammavariate(burstiness, 1.0 / (rate_per_s * burstiness))


def _around(generator: random.Random, length: int, ratio: float) -> int:
    low, high = max(1, round(length * (1 - ratio))), round(length * (1 + ratio))
    return generator.randint(low, max(low, high))
