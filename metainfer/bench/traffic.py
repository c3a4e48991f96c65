"""Traffic: requests that come by themselves, the same ones for every side. No torch here.

Gaps between arrivals are exponential (Poisson), lengths are log-uniform. A share of the requests
goes on with the conversation of an earlier one: its prompt is that one's prompt, an answer, and a
new turn. That answer is drawn beforehand, not the one that the model gave, so that all sides get
the same prompts.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from metainfer.bench.workload import arrival_times_s

FIRST_ID = 16  # special tokens lie at the start of vocabularies


@dataclass(frozen=True, slots=True)
class Pattern:
    """Attributes:
    requests: how many.
    rate_per_s: of arrivals.
    shortest, longest: prompt tokens, log-uniform between.
    answer: output tokens of each request.
    multi_turn: share of the requests that continue an earlier one.
    """

    requests: int
    rate_per_s: float
    shortest: int
    longest: int
    answer: int
    multi_turn: float

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "arrivals": "Poisson",
            "lengths": "log-uniform",
            "earlier_answers": "drawn",
        }


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes `at_s` after the start. `continues`: it is a later turn."""

    at_s: float
    prompt: tuple[int, ...]
    count: int
    continues: bool


@dataclass(frozen=True, slots=True)
class Served:
    """What one request got. `tpot_s` is None where it had a single token.

    Attributes:
        cached_tokens: of the prompt, that were not computed again.
    """

    ttft_s: float
    tpot_s: float | None
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


def draw_arrivals(pattern: Pattern, key: str, vocab_size: int) -> list[Arrival]:
    """The requests in the order in which they come; another key gives other ones."""
    generator = random.Random(key)
    times = arrival_times_s(generator.randrange(2**31), pattern.rate_per_s, 1.0)
    arrivals: list[Arrival] = []
    open_prompts: list[tuple[int, ...]] = []  # of conversations that may go on
    for _, at_s in zip(range(pattern.requests), times, strict=False):
        low, high = math.log(pattern.shortest), math.log(pattern.longest)
        length = round(math.exp(generator.uniform(low, high)))
        fits = [p for p in open_prompts if len(p) + pattern.answer < length]
        continues = bool(fits) and generator.random() < pattern.multi_turn
        before: tuple[int, ...] = ()
        if continues:
            before = generator.choice(fits)
            open_prompts.remove(before)
        new = draw_ids(generator, length - len(before), vocab_size)
        prompt = (*before, *new)
        open_prompts.append(prompt)
        arrivals.append(Arrival(at_s, prompt, pattern.answer, continues))
    return arrivals


def draw_ids(generator: random.Random, count: int, vocab_size: int) -> list[int]:
    """Random token ids, but for special ones."""
    first = min(FIRST_ID, vocab_size - 1)
    return generator.choices(range(first, vocab_size), k=count)


def draw_prompts(key: str, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random prompts that only this key gives."""
    generator = random.Random(key)
    return [draw_ids(generator, length, vocab_size) for _ in range(count)]
