"""Whether two engines say the same: llama.cpp follows metainfer's greedy tokens, one by one.

At each place llama.cpp has read what metainfer had read, in the steps in which it would have made
the tokens itself, so up to the first difference these are its own greedy tokens. After a difference
the comparison goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from side import Side

MARGIN = 0.05
"""Tokens whose log-probabilities are nearer than this may change places by rounding."""


def compare(engine: Side, peer: Side, prompts: Sequence[list[int]], count: int) -> dict[str, Any]:
    """Compare `count` greedy tokens after each prompt; see `summarise` for the fields."""
    places = []
    for number, prompt in enumerate(prompts):
        ours = engine.ask("greedy", prompt, count)
        theirs = peer.ask("follow", prompt, ours["ids"])
        for place in range(count):
            places.append(
                {
                    "prompt": number,
                    "prompt_tokens": len(prompt),
                    "place": place,
                    "ours": ours["ids"][place],
                    "theirs": theirs["ids"][place],
                    "margin": ours["margins"][place],
                    "logprob_difference": abs(ours["logprobs"][place] - theirs["logprobs"][place]),
                }
            )
    return {"engine": engine.title, "peer": peer.title, **summarise(places)}


def summarise(places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was compared, and where it differed.

    Returns:
        clear, clear_equal: places whose margin is at least MARGIN, and those where ids are equal.
        close, close_equal: likewise for the places with less.
        until_close: per prompt, "compared" places before the first close one and how many of them
            are "equal" up to the first difference.
        differences: the places where ids differ.
        logprob_difference: largest and mean distance of the log-probabilities of the tokens said.
    """
    clear = [p for p in places if p["margin"] >= MARGIN]
    close = [p for p in places if p["margin"] < MARGIN]
    distances = [p["logprob_difference"] for p in places]
    numbers = sorted({p["prompt"] for p in places})
    return {
        "margin": MARGIN,
        "clear": len(clear),
        "clear_equal": sum(map(_equal, clear)),
        "close": len(close),
        "close_equal": sum(map(_equal, close)),
        "until_close": [_until_close([p for p in places if p["prompt"] == n]) for n in numbers],
        "differences": [dict(p) for p in places if not _equal(p)],
        "logprob_difference": {
            "largest": max(distances),
            "mean": sum(distances) / len(distances),
        },
    }


def _equal(place: Mapping[str, Any]) -> bool:
    return bool(place["ours"] == place["theirs"])


def _until_close(places: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Of one prompt's places, in order."""
    compared = next((n for n, p in enumerate(places) if p["margin"] < MARGIN), len(places))
    equal = next((n for n, p in enumerate(places[:compared]) if not _equal(p)), compared)
    return {
        "prompt_tokens": places[0]["prompt_tokens"],
        "compared": compared,
        "equal": equal,
        "equal_in_all": next((n for n, p in enumerate(places) if not _equal(p)), len(places)),
    }
