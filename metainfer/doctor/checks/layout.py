"""Layout: what the search over all layouts says, and what one group over all cards loses to it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from metainfer.core.errors import UserError
from metainfer.doctor.estimate import STOCK, workload_of
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.machine import gpus_of
from metainfer.plan.emit import emit
from metainfer.plan.engine_commands import VLLM
from metainfer.plan.found import Candidate
from metainfer.plan.ledger_ranks import RankLedgers
from metainfer.plan.search import Result, search
from metainfer.plan.speculation import tokens_text

WIDTH = "width of tensor parallelism"
PLAN = "layout of the plan"

_LIMITS = re.compile(r" --max-(model-len|num-seqs) \S+")
"""Of a command: they are the owner's."""
_WORTH_IT = 1.15
"""Estimates that differ by less are called equal."""


def layouts(patient: Patient) -> Iterator[Finding]:
    """What `metainfer plan` ranks first, of engines as they come, and what all cards in one group
    of tensor parallelism lose to that."""
    shape, machine = patient.shape, patient.machine
    if shape is None or not gpus_of(machine):
        return
    try:
        result = search(shape, machine, workload_of(shape), RankLedgers(), profile=STOCK)
    except UserError as error:
        nothing_fits = error.message.startswith("no layout")
        yield Finding(
            PLAN,
            Level.FAIL if nothing_fits else Level.UNKNOWN,
            error.message,
            error.hint or "",
            "no engine will serve it here" if nothing_fits else "",
            "a smaller model, fewer bits, or more or larger cards" if nothing_fits else "",
        )
        return
    yield _planned(result)
    yield from _width(result)


def _planned(result: Result) -> Finding:
    name, best = result.shape.name, result.best
    converted = [note for note in result.notes if "converted checkpoint" in note]
    return Finding(
        PLAN,
        Level.WARN if converted else Level.OK,
        converted[0]
        if converted
        else f"of all layouts {best.layouts.name} answers most requests, and reads about"
        f" {best.prediction.input_per_s:,.0f} input tok/s",
        f"{_told(best)}, first token after {best.prediction.ttft_s:.2f} s, with engines as they"
        f" come; may be off by {best.prediction.input_error:.0%}",
        "as released its weights alone are more than all cards hold" if converted else "",
        f"`metainfer plan {name} --engine stock --explain` shows the others, and `metainfer plan`"
        " without --engine what better kernels and exchanges would give",
    )


def _width(result: Result) -> Iterator[Finding]:
    """All cards in one group, where the model divides so and fits, against the best."""
    gpus = len(gpus_of(result.machine))
    wide = next((one for one in result.ranked if _ranks_of_heads(one) == gpus), None)
    if wide is None or gpus < 2:
        return
    groups = [one for one in result.ranked if _ranks_of_heads(one)]
    shown = dict.fromkeys([result.best, *groups])
    evidence = "; ".join(_told(one) for one in shown)
    best = result.best.prediction
    if best.requests_per_s < _WORTH_IT * wide.prediction.requests_per_s:
        yield Finding(
            WIDTH,
            Level.OK,
            f"TP{gpus} is about as good as any other layout",
            evidence,
        )
        return
    emitted = emit(result, VLLM, "MODEL")
    more = len(emitted.commands) - 1
    yield Finding(
        WIDTH,
        Level.WARN,
        f"{result.shape.name} answers more requests as {result.best.layouts.name} than as TP{gpus}",
        evidence,
        f"estimated {wide.prediction.requests_per_s:.3g} requests a second as it is and"
        f" {best.requests_per_s:.3g} as {result.best.layouts.name} (either may be off by"
        f" {max(best.input_error, best.decode_error):.0%}), of {result.workload.input_tokens:,}"
        f" tokens in and {result.workload.output_tokens:,} out, with vLLM or SGLang as they come",
        _LIMITS.sub("", emitted.commands[0])
        + (f", and {more} more like it behind any load balancer" if more else "")
        + "".join(f"; it does not say: {sentence}" for sentence in emitted.lost)
        + f"; `metainfer plan {result.shape.name} --engine stock --emit vllm` prints all, as"
        " --emit sglang does",
        "cost model of `metainfer plan`; two replicas of TP2 beat TP4 with V4-Flash"
        " (github.com/local-inference-lab), TP8 is 1.12 to 1.14 times TP4 even over NVLink"
        " (github.com/sgl-project/sglang/pull/39062)",
    )


def _ranks_of_heads(one: Candidate) -> int:
    """Of a layout that divides nothing but heads, and experts with them; 0 for others."""
    before, after = one.layouts.prefill, one.layouts.decode
    plain = before.context == after.context == before.pipeline == 1
    return after.tensor if plain and before.tensor == after.tensor else 0


def _told(one: Candidate) -> str:
    told, drafted = one.prediction, one.formats.draft
    drafts = f" drafting {tokens_text(drafted)}" if drafted else ""
    return (
        f"{one.layouts.name}{drafts}: {told.requests_per_s:.3g} requests a second,"
        f" {told.input_per_s:,.0f} input tok/s, {told.tpot_s * 1e3:.1f} ms between tokens"
    )


CHECKS = (
    Check(PLAN, "Which of all layouts is best, does any fit, what does one group lose?", layouts),
)
