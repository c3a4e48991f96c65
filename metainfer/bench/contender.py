"""Contender: one side of a comparison, as its process drives it. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from metainfer.bench.traffic import Arrival, Served

Prompts = Sequence[Sequence[int]]

ENGINE = "metainfer"
PEER_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Timing:
    """`tokens` were computed in `seconds`."""

    tokens: int
    seconds: float


class Contender(Protocol):
    """A loaded model that can be asked to do a piece of work. All sides count alike."""

    @property
    def dtype(self) -> str:
        """Of activations and matrix products, such as "bfloat16"."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of the GPUs that it works on, as torch counts them."""

    def prefill(self, prompt: Sequence[int]) -> Timing:
        """Compute one prompt, up to its first new token; the tokens counted are the prompt's."""

    def decode(self, prompts: Prompts, count: int, on_start: Callable[[], None]) -> Timing:
        """Give each of the equally long prompts `count` greedy tokens. Timed from when all have
        their first one, which `on_start` is told; the tokens counted are those that come after."""

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens after a prompt."""

    def score(self, windows: Prompts) -> list[list[tuple[float, list[tuple[int, float]]]]]:
        """Of every token of each window but its first: its log-probability, and the likeliest
        tokens with theirs. Raises UserError if the side does not tell them."""

    def traffic(self, arrivals: Sequence[Arrival]) -> list[Served]:
        """Serve requests as they come. Raises UserError if the side has no scheduler."""

    def receipt(self) -> dict[str, Any]:
        """What it is and how it runs, once it is loaded."""

    def counted(self) -> dict[str, int]:
        """So far: "prompt_tokens", of them "cached_tokens" that were not computed, and
        "kernels_compiled" while requests waited, where that is known."""
