"""One run of `bench quality`: each setting predicts the same, one after the other; then the record
and a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from metainfer.arch.record import Arch
from metainfer.bench.model_report import leading_equal
from metainfer.bench.paired_settings import A, B
from metainfer.bench.quality_compare import divergence, plain, verdict
from metainfer.bench.quality_data import QualityData
from metainfer.bench.quality_settings import QualityLoad
from metainfer.bench.record import prose, provenance, table
from metainfer.bench.side_process import SideProcess, side_process
from metainfer.bench.stages import Contestant


def measure(
    load: QualityLoad,
    contestants: Sequence[Contestant],
    data: QualityData,
    on_step: Callable[[str], None],
    on_progress: Callable[[int, int], None],
) -> dict[str, dict[str, Any]]:
    """What each side said, by name. Raises UserError if one cannot start or fails.

    Args:
        on_step: told in words what begins.
        on_progress: told how many of how many prompts of a side are done.
    """
    said = {}
    for one in contestants:
        on_step(f"{one.name}: loading")
        with side_process(one.name, one.setup, one.threads) as process:
            on_step(f"{one.name}: {len(data.windows)} windows, {len(data.needles)} needles")
            said[one.name] = _of_one(process, load, data, on_progress)
    return said


def _of_one(
    process: SideProcess,
    load: QualityLoad,
    data: QualityData,
    on_progress: Callable[[int, int], None],
) -> dict[str, Any]:
    total, done = 2 * len(data.windows) + len(data.needles), itertools.count(1)

    def must(do: str, prompt: Sequence[int], **arguments: Any) -> dict[str, Any]:
        answer = process.must(do, prompts=[prompt], **arguments)
        on_progress(next(done), total)
        return answer

    scores = [must("score", window)["scores"][0] for window in data.windows]
    greedy = [must("greedy", window, count=load.answers)["ids"] for window in data.windows]
    recalled = [
        must("greedy", needle.prompt, count=len(needle.answer))["ids"] == list(needle.answer)
        for needle in data.needles
    ]
    return {
        "receipt": process.ready,
        "scores": scores,
        "greedy": greedy,
        "recalled": recalled,
        "tokens": {k: n for k, n in process.must("counted").items() if k.endswith("_tokens")},
    }


def record(
    said: Mapping[str, Mapping[str, Any]],
    load: QualityLoad,
    data: QualityData,
    model: str,
    arch: Arch,
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON record; its verdict says whether B may stand in for A."""
    a, b = said[A], said[B]
    found = divergence(a["scores"], b["scores"], data.windows)
    recall_a, recall_b = (_share(side["recalled"]) for side in (a, b))
    equal = [leading_equal(x, y) for x, y in zip(a["greedy"], b["greedy"], strict=True)]
    return {
        **provenance(),
        "kind": "quality",
        "machine": dict(machine),
        "model": model,
        "arch": {"layers": arch.num_layers, "vocab_size": arch.vocab_size},
        "load": asdict(load),
        "a": load.a,
        "b": load.b,
        "source": data.source,
        "held_out": data.held_out,
        "windows": len(data.windows),
        "longest": data.longest,
        "divergence": plain(found),
        "divergence_is": "a lower bound: tokens that both tell of their 20 likeliest, the rest as"
        " one",
        "equal_leading_greedy_tokens": equal,
        "needles": {
            "count": len(data.needles),
            "recall_a": recall_a,
            "recall_b": recall_b,
            "by_distance": [
                [needle.distance, x, y]
                for needle, x, y in zip(data.needles, a["recalled"], b["recalled"], strict=True)
            ],
        },
        "verdict": verdict(found, recall_a, recall_b, load.thresholds),
        "sides": {
            name: {"receipt": side["receipt"], "tokens": side["tokens"]}
            for name, side in said.items()
        },
    }


def _share(recalled: Sequence[bool]) -> float | None:
    return sum(recalled) / len(recalled) if recalled else None


def text_report(made: Mapping[str, Any]) -> str:
    found, needles, judged = made["divergence"], made["needles"], made["verdict"]
    rows = [
        ["perplexity", f"{found['perplexity_a']:.4f}", f"{found['perplexity_b']:.4f}"],
        ["  rise", "", f"{found['perplexity_rise']:+.3%}"],
        ["divergence, mean nats", "", f"{found['kl']:.3g}"],
        ["  99th percentile", "", f"{found['kl_p99']:.3g}"],
        ["equal likeliest tokens", "", f"{found['top1']:.2%}"],
    ]
    if needles["count"]:
        recall = (f"{needles[key]:.1%}" for key in ("recall_a", "recall_b"))
        rows.append([f"recall of {needles['count']} needles", *recall])
    equal, most = made["equal_leading_greedy_tokens"], made["load"]["answers"]
    told = [
        f"A: {made['a']}",
        f"B: {made['b']}",
        f"{found['tokens']:,} tokens of {made['windows']} windows from {made['source']};"
        f" divergence over {found['told']:.1%} of the probability, a lower bound",
        f"greedy tokens after windows that agree, of {most}: {' '.join(map(str, equal))}",
        "passed" if judged["passed"] else "failed: " + "; ".join(judged["failed"]),
    ]
    return "\n".join([table(["", A, B], rows), "", *map(prose, told)])
