"""Layout: whether all cards in one group of tensor parallelism is the best that they can do."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.core.errors import UserError
from metainfer.doctor.estimate import (
    STOCK,
    gpus_of,
    predicted,
    tensor_layouts,
    tensor_sizes,
    told,
    transfers_share,
    workload_of,
)
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.plan.layouts import Formats
from metainfer.plan.ledger_ranks import RankLedgers
from metainfer.plan.search import search

_WIDTH = "width of tensor parallelism"
_PLAN = "layout of the plan"

_WORTH_IT = 1.15
"""Estimates that differ by less are called equal."""


def width(patient: Patient) -> Iterator[Finding]:
    """All cards in one group, against replicas of smaller groups, with engines as they come."""
    shape, machine = patient.shape, patient.machine
    gpus = len(gpus_of(machine))
    if shape is None or gpus < 2:
        return
    ledgers, rates = RankLedgers(), {}
    for size in tensor_sizes(shape, gpus):
        found = predicted(shape, machine, size)
        fits = ledgers(
            shape, machine, tensor_layouts(size, gpus), workload_of(shape), Formats()
        ).fits
        if found is not None and fits:
            rates[size] = found
    if len(rates) < 2 or max(rates) == 1:
        return
    widest = max(rates)
    best = max(rates, key=lambda size: rates[size].input_per_s)
    names = {size: tensor_layouts(size, gpus).decode.name for size in rates}
    evidence = "; ".join(
        f"{names[size]}: {one.input_per_s:,.0f} input tok/s, {one.tpot_s * 1e3:.1f} ms between"
        f" tokens, {transfers_share(one):.0%} of prefill in exchanges"
        for size, one in rates.items()
    )
    if rates[best].input_per_s < _WORTH_IT * rates[widest].input_per_s:
        yield Finding(_WIDTH, Level.OK, f"TP{widest} is about as good as any narrower group",
                      evidence)  # fmt: skip
        return
    cards = ",".join(str(place) for place in range(best))
    rest = ",".join(str(place) for place in range(best, min(2 * best, gpus)))
    yield Finding(
        _WIDTH,
        Level.WARN,
        f"{shape.name} reads faster in {names[best]} than in TP{widest}",
        evidence,
        told(rates[widest], rates[best], f"as {names[best]}")
        + "; with vLLM or SGLang as they come",
        f"start {gpus // best} servers of {best} cards: CUDA_VISIBLE_DEVICES={cards} vllm serve"
        f" ... --tensor-parallel-size {best} --port 8000, the next with {rest} and --port 8001,"
        " behind any load balancer; where the longest contexts only fit wider, keep one wide",
        "cost model of `metainfer plan`; two replicas of TP2 beat TP4 with V4-Flash"
        " (github.com/local-inference-lab), TP8 is 1.12 to 1.14 times TP4 even over NVLink"
        " (github.com/sgl-project/sglang/pull/39062)",
    )


def plan(patient: Patient) -> Iterator[Finding]:
    """What the search over all layouts says, of engines as they come."""
    shape, machine = patient.shape, patient.machine
    if shape is None or not gpus_of(machine):
        return
    try:
        found = search(shape, machine, workload_of(shape), RankLedgers(), profile=STOCK)
    except UserError as error:
        nothing_fits = error.message.startswith("no layout")
        yield Finding(
            _PLAN,
            Level.FAIL if nothing_fits else Level.UNKNOWN,
            error.message,
            error.hint or "",
            "no engine will serve it here" if nothing_fits else "",
            "a smaller model, fewer bits, or more or larger cards" if nothing_fits else "",
        )
        return
    best = found.best.prediction
    converted = [note for note in found.notes if "converted checkpoint" in note]
    yield Finding(
        _PLAN,
        Level.WARN if converted else Level.OK,
        converted[0]
        if converted
        else f"of all layouts {found.best.layouts.name} answers most requests, and reads about"
        f" {best.input_per_s:,.0f} input tok/s",
        f"{found.best.layouts.name}: {best.input_per_s:,.0f} input tok/s, first token"
        f" after {best.ttft_s:.2f} s, {best.tpot_s * 1e3:.1f} ms between tokens, with engines as"
        f" they come; may be off by {best.input_error:.0%}",
        "as released its weights alone are more than all cards hold" if converted else "",
        f"`metainfer plan {shape.name} --engine stock --explain` shows the others, and"
        " `metainfer plan` without --engine what better kernels and exchanges would give",
    )


CHECKS = (
    Check(_WIDTH, "Is one group over all cards better than replicas of smaller ones?", width),
    Check(_PLAN, "Which of all layouts is best, and does any fit?", plan),
)
