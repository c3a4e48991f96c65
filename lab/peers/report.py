"""What compare_llama.py measures, and what is made of it: rates, ratios, their spread, a page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CONTEXT_STEP = 256  # llama.cpp rounds contexts up to it


@dataclass(frozen=True, slots=True)
class Load:
    """What every side is asked to do. Lengths in tokens.

    Attributes:
        rounds: turns of each side that count; one more comes before them.
        agreement_prompts: prompts of each length in `agreement_contexts`.
        ubatch: tokens that llama.cpp computes at once.
    """

    rounds: int
    prefill_tokens: int
    decode_context: int
    decode_tokens: int
    agreement_contexts: tuple[int, ...]
    agreement_prompts: int
    agreement_tokens: int
    threads: int
    ubatch: int
    seed: int

    def works(self) -> list[tuple[str, int, int]]:
        """(command, prompt tokens, new tokens) of what is timed."""
        return [
            ("prefill", self.prefill_tokens, 1),
            ("decode", self.decode_context, self.decode_tokens),
        ]

    def longest(self) -> int:
        """Longest sequence of all, rounded up as llama.cpp does."""
        most = max(
            self.prefill_tokens + 1,
            self.decode_context + self.decode_tokens,
            max(self.agreement_contexts) + self.agreement_tokens,
        )
        return -(-most // _CONTEXT_STEP) * _CONTEXT_STEP


def speeds(load: Load, titles: Sequence[str], rates: Mapping[tuple[str, str], Sequence[float]]) -> list[dict[str, Any]]:
    """Per work: tokens a second of each side (median, lowest, highest, all rounds), and ratios of
    engine to peer, formed round by round. Sides come in pairs of engine and peer."""
    made = []
    for do, prompt_tokens, count in load.works():
        ratios = []
        for ours, theirs in zip(titles[::2], titles[1::2], strict=True):
            each = [a / b for a, b in zip(rates[do, ours], rates[do, theirs], strict=True)]
            ratios.append({"engine": ours, "peer": theirs, **_spread(each)})
        made.append(
            {
                "work": do,
                "prompt_tokens": prompt_tokens,
                "new_tokens": count,
                "tokens_per_s": {title: _spread(rates[do, title]) for title in titles},
                "ratios": ratios,
            }
        )
    return made


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "rounds": list(values),
    }


def markdown(made: Mapping[str, Any]) -> str:
    """The record as tables."""
    lines = ["| tokens/s, median (lowest to highest round) | " + " | ".join(_titles(made)) + " |"]
    lines.append("| --- |" + " ---: |" * len(_titles(made)))
    for work in made["works"]:
        cells = [_cell(work["tokens_per_s"][title], 0) for title in _titles(made)]
        lines.append(f"| {_work_name(work)} | " + " | ".join(cells) + " |")
    memory = [f"{side['peak_bytes'] / 1e6:.0f}" for side in made["sides"]]
    lines.append("| peak memory of the process, MB | " + " | ".join(memory) + " |")
    lines += ["", "| metainfer / llama.cpp, round by round | by default | both fp32 |"]
    lines.append("| --- | ---: | ---: |")
    for work in made["works"]:
        cells = [_cell(ratio, 2) for ratio in work["ratios"]]
        lines.append(f"| {_work_name(work)} | " + " | ".join(cells) + " |")
    lines.append("")
    lines += [*_agreement_table(made["agreement"]), ""]
    lines += _difference_lines(made["agreement"])
    return "\n".join(lines)


def _titles(made: Mapping[str, Any]) -> list[str]:
    return [side["title"] for side in made["sides"]]


def _work_name(work: Mapping[str, Any]) -> str:
    if work["work"] == "prefill":
        return f"prefill of {work['prompt_tokens']} tokens"
    return f"decode, batch 1, after {work['prompt_tokens']} tokens"


def _cell(value: Mapping[str, Any], digits: int) -> str:
    low, high = f"{value['lowest']:.{digits}f}", f"{value['highest']:.{digits}f}"
    return f"{value['median']:.{digits}f} ({low} to {high})"


def _agreement_table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Equal tokens of how many, and distances of log-probabilities, a row for each pair."""
    margin = entries[0]["margin"]
    lines = [
        f"| greedy tokens equal | until a margin < {margin} | margin >= {margin} | margin < {margin} "
        "| log-probability apart, mean | most |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for entry in entries:
        until = entry["until_close"]
        cells = [
            f"{entry['engine']} and {entry['peer']}",
            f"{sum(p['equal'] for p in until)} of {sum(p['compared'] for p in until)}",
            f"{entry['clear_equal']} of {entry['clear']}",
            f"{entry['close_equal']} of {entry['close']}",
            f"{entry['logprob_difference']['mean']:.5f}",
            f"{entry['logprob_difference']['largest']:.5f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _difference_lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The largest margins at which greedy tokens differ."""
    lines = []
    for entry in entries:
        for place in sorted(entry["differences"], key=lambda place: -place["margin"])[:3]:
            lines.append(
                f"- {entry['engine']} and {entry['peer']} differ in token {place['place']} after "
                f"{place['prompt_tokens']} tokens, margin {place['margin']:.3f}"
            )
    return lines
