"""What is made of the turns of `bench model`: rates, ratios, their spread, agreement, a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from metainfer.bench.contender import Timing
from metainfer.bench.model import SideResult, side_title, works
from metainfer.bench.model_settings import ModelLoad
from metainfer.bench.record import provenance, table


def record(
    results: Sequence[SideResult],
    load: ModelLoad,
    model: str,
    threads: int,
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON record. `works` compares the engine (first in `results`) with the faster peer."""
    engine, peers = results[0], results[1:]
    return {
        **provenance(),
        "machine": dict(machine),
        "model": model,
        "threads": threads,
        "load": {**asdict(load), "model": model},
        "sides": [_side_record(side) for side in results],
        "works": [_compare(work.name, engine, peers) for work in works(load)],
        "peak_bytes": {side.side: side.peak_bytes for side in results},
        "agreement": [
            {"with": peer.side, **agreement(engine.greedy, peer.greedy)} for peer in peers
        ],
    }


def tokens_per_s(timing: Timing) -> float:
    return timing.tokens / max(timing.seconds, 1e-9)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Equal leading tokens of each prompt's greedy answers, and how many there were in all."""
    equal = [leading_equal(a, b) for a, b in zip(ours, theirs, strict=True)]
    return {"equal_leading_tokens": equal, "tokens": [len(answer) for answer in ours]}


def leading_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def text_report(made: Mapping[str, Any]) -> str:
    """The record as a table of at most 100 columns."""
    engine_dtype = made["sides"][0]["dtype"]
    header = ["", f"metainfer {engine_dtype}", "transformers", "its dtype", "ratio", "of rounds"]
    rows = [
        [
            f"{work['name']}, tokens/s",
            f"{work['engine_tokens_per_s']:.1f}",
            f"{work['peer_tokens_per_s']:.1f}",
            work["peer"],
            f"{work['ratio']:.2f}",
            f"{work['ratio_low']:.2f} to {work['ratio_high']:.2f}",
        ]
        for work in made["works"]
    ]
    sides = made["sides"]
    peaks = {side["dtype"]: side["peak_bytes"] for side in sides[1:]}
    above = {side["dtype"]: side["peak_bytes"] - side["libraries_bytes"] for side in sides[1:]}
    engine = sides[0]
    rows += [
        _memory_row("peak memory, MB", engine["peak_bytes"], peaks),
        _memory_row(
            "  above its libraries, MB", engine["peak_bytes"] - engine["libraries_bytes"], above
        ),
    ]
    lines = [table(header, rows), ""]
    lines += [_agreement_line(entry) for entry in made["agreement"] if entry["tokens"]]
    return "\n".join(lines)


def _memory_row(label: str, ours: int, peers: Mapping[str, int]) -> list[str]:
    """Against the peer that needs least. `peers`: dtype -> bytes."""
    dtype = min(peers, key=lambda name: peers[name])
    theirs = max(peers[dtype], 1)
    return [label, f"{ours / 1e6:.0f}", f"{theirs / 1e6:.0f}", dtype, f"{ours / theirs:.2f}", ""]


def _agreement_line(entry: Mapping[str, Any]) -> str:
    equal = " ".join(
        f"{n}/{total}"
        for n, total in zip(entry["equal_leading_tokens"], entry["tokens"], strict=True)
    )
    return f"equal leading greedy tokens with {side_title(entry['with'])}: {equal}"


def _side_record(side: SideResult) -> dict[str, Any]:
    return {
        "side": side.side,
        "dtype": side.dtype,
        "libraries_bytes": side.libraries_bytes,
        "peak_bytes": side.peak_bytes,
        "tokens_per_s": {
            name: [tokens_per_s(timing) for timing in timings]
            for name, timings in side.timings.items()
        },
    }


def _compare(name: str, engine: SideResult, peers: Sequence[SideResult]) -> dict[str, Any]:
    """The engine against the peer with the higher median rate, round by round."""
    ours = [tokens_per_s(timing) for timing in engine.timings[name]]
    rates = {peer.side: [tokens_per_s(t) for t in peer.timings[name]] for peer in peers}
    faster = max(rates, key=lambda side: statistics.median(rates[side]))
    ratios = [a / b for a, b in zip(ours, rates[faster], strict=True)]
    return {
        "name": name,
        "engine_tokens_per_s": statistics.median(ours),
        "peer": faster,
        "peer_tokens_per_s": statistics.median(rates[faster]),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }
