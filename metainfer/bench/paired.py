"""What is made of the turns of `bench paired`: the effect at each piece of work, as a record and a
table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from metainfer.arch.record import Arch
from metainfer.bench.paired_settings import A, B, PairedLoad
from metainfer.bench.record import table
from metainfer.bench.stages import StagesRun
from metainfer.bench.stages_report import not_cold_lines
from metainfer.bench.stages_report import record as stages_record
from metainfer.bench.stages_settings import TOGETHER
from metainfer.bench.statistics_paired import paired_effect
from metainfer.core.errors import UserError


def record(
    run: StagesRun, load: PairedLoad, model: str, arch: Arch, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of the turns, with the effect of each piece of work that both settings did.

    Raises UserError if there is none, or if there was no time for two pairs.
    """
    made = stages_record(run, load.stages(), model, arch, machine)
    failed = {
        work: (name, why) for name in run.sides for work, why in run.sides[name].missing.items()
    }
    made["works"] = [work for work in made["works"] if work["name"] not in failed]
    if not made["works"]:
        work, (name, why) = next(iter(failed.items()))
        raise UserError(f"{name} failed at {work}: {why}", hint="ask for shorter work")
    if run.rounds < 2:
        raise UserError(
            f"there was time for {run.rounds} pairs, and two are needed",
            hint="give a longer --budget, or less work",
        )
    made |= {"kind": "paired", "load": asdict(load), "a": load.a, "b": load.b, "pattern": None}
    for work in made["works"]:
        for side in work["sides"].values():  # a turn of the last pair may have been the last
            for key in ("seconds", "tokens"):
                side[key] = side[key][: run.rounds]
        rates_a, rates_b = (_rates(work["sides"][name]) for name in (A, B))
        work["effect"] = asdict(paired_effect(rates_a, rates_b))
        work["effects"] = [b / a - 1.0 for a, b in zip(rates_a, rates_b, strict=True)]
    return made


def failures(made: Mapping[str, Any]) -> list[str]:
    """Sentences that say which setting did not do which work, and why."""
    return [
        f"{name} failed at {work}: {why}"
        for name, side in made["sides"].items()
        for work, why in side["missing"].items()
    ]


def _rates(side: Mapping[str, Any]) -> list[float]:
    return [n / max(s, 1e-9) for n, s in zip(side["tokens"], side["seconds"], strict=True)]


def text_report(made: Mapping[str, Any]) -> str:
    """How much faster B is than A."""
    header = [
        "",
        "A, tok/s",
        "B, tok/s",
        "B over A",
        "95 % confidence",
        "p (t)",
        "p (W)",
        "B faster",
    ]
    rows = []
    for work in made["works"]:
        effect = work["effect"]
        wilcoxon = effect["p_wilcoxon"]
        rows.append(
            [
                work["name"],
                *(f"{work['sides'][name]['tokens_per_s']:,.1f}" for name in (A, B)),
                f"{effect['mean']:+.2%}",
                f"{effect['low']:+.2%} to {effect['high']:+.2%}",
                f"{effect['p_t']:.2g}",
                "-" if wilcoxon is None else f"{wilcoxon:.2g}",
                f"{effect['wins']}/{effect['pairs']}",
            ]
        )
    lines = [table(header, rows), "", f"A: {made['a']}", f"B: {made['b']}"]
    cached = sum(side["tokens"]["cached_tokens"] for side in made["sides"].values())
    apart = "" if made["engines"] == TOGETHER else ", each turn in a process of its own"
    lines.append(
        f"{made['model']}: {made['arch']['layers']} layers; {made['rounds']} pairs, interleaved,"
        f" order alternating{apart}; {cached} prompt tokens cached"
    )
    lines += failures(made)
    lines += not_cold_lines(made)
    return "\n".join(lines)
