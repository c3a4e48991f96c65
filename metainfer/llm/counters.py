"""Counters: what a scheduler has done since it began. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Sums since the start. Recomputed tokens of preempted requests are not counted again."""

    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    errors: int = 0
