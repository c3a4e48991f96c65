"""Found: a layout that fits with what is predicted of it, and by what others lose to the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from metainfer.arch.shapes import ModelShape
from metainfer.hardware.machine import Machine
from metainfer.plan.choices import SELF
from metainfer.plan.cost.phases import Phases
from metainfer.plan.cost.predict import Prediction
from metainfer.plan.layout_flags import not_run
from metainfer.plan.layouts import Formats, Layouts
from metainfer.plan.speculation import ACCEPTED, tokens_a_step, tokens_text
from metainfer.plan.workload import Workload

THROUGHPUT, TTFT, INTERACTIVE = "throughput", "ttft", "interactive"
OBJECTIVES = (THROUGHPUT, TTFT, INTERACTIVE)
TIMED_ON = "sm_90"
"""Where its kernels were timed."""


class Fits(Protocol):
    """What a search asks of the ledger of the fullest rank."""

    @property
    def fits(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...


Ledger = Callable[[ModelShape, Machine, Layouts, Workload, Formats], Fits]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits. `why` says of all but the first what they lose by; `phases` are times of
    its steps, to ask for more."""

    layouts: Layouts
    formats: Formats
    prediction: Prediction
    ledger: Fits
    phases: Phases
    why: str = ""


def explained(one: Candidate, best: Candidate, objective: str) -> Candidate:
    """With what it loses by."""
    if one is best:
        return one
    mine, other = one.prediction, best.prediction
    parts = {
        THROUGHPUT: _less("requests a second", mine.requests_per_s, other.requests_per_s),
        TTFT: _more("to the first token", mine.ttft_s, other.ttft_s),
        INTERACTIVE: _more("between tokens", mine.tpot_s, other.tpot_s),
    }
    told = [parts[objective] or parts[THROUGHPUT]]  # all of them are under overload
    if objective != INTERACTIVE:
        told.append(_largest_loss(one, best, "a prompt token", 1e6, "us", prefill=True))
    if objective != TTFT:
        told.append(_largest_loss(one, best, "each next token", 1e3, "ms", prefill=False))
    return replace(one, why="; ".join(filter(None, told)))


def _less(what: str, mine: float, best: float) -> str:
    return f"{1 - mine / best:.0%} fewer {what}"


def _more(what: str, mine: float, best: float) -> str:
    if math.isinf(mine):
        return "" if math.isinf(best) else "more requests arrive than it answers"
    return f"{mine / best - 1:.0%} longer {what}"


def _largest_loss(
    one: Candidate, best: Candidate, per: str, scale: float, unit: str, prefill: bool
) -> str:
    """The kind of work that costs most more than in the best layout, both per machine."""

    def times(candidate: Candidate) -> dict[str, float]:
        step = candidate.prediction.prefill if prefill else candidate.prediction.decode
        # Replicas work beside each other: what counts is the time per token of the machine.
        beside = candidate.layouts.prefill.replicas
        share = scale / (beside if prefill else tokens_a_step(candidate.formats.draft))
        return {group: seconds * share for group, seconds in step.by_group().items()}

    mine, other = times(one), times(best)
    groups = {*mine, *other}
    worst = max(groups, key=lambda group: mine.get(group, 0.0) - other.get(group, 0.0))
    lost = mine.get(worst, 0.0) - other.get(worst, 0.0)
    if lost < 0.02 * sum(other.values()):
        return ""
    return f"{worst} {mine.get(worst, 0):.1f} {unit} of {per} against {other.get(worst, 0):.1f}"


def notes_of(best: Candidate, workload: Workload) -> list[str]:
    notes = [*_engine(best.phases, best)]
    group = best.layouts.decode.group
    links = best.phases.transfers
    if group > 1 and not links.p2p(group, best.layouts.decode.replicas):
        notes.append(
            "GPUs of a group do not reach each other's memory: exchanges go through host memory"
        )
    drafted = best.formats.draft
    if drafted:
        notes.append(
            f"drafting {tokens_text(drafted)} gives {tokens_a_step(drafted):.1f} a step if"
            f" {ACCEPTED:.0%} of them hold, which is inferred and depends on the text"
        )
    load = best.prediction.load
    if load is not None and load >= 1.0:
        notes.append(
            f"{workload.request_rate_per_s:g} requests a second are {load:.1f} times what this"
            " machine answers: the queue grows without end, and so does the time to a first token"
        )
    return notes


def _engine(phases: Phases, best: Candidate) -> list[str]:
    """Whose efficiency was assumed, and what of the layout this version does not run."""
    profile, layout = phases.profile, best.layouts.decode
    notes = [f"engine {profile.name}: {profile.meaning}"]
    if profile.name != SELF:
        return notes
    arch = phases.rates.arch
    if arch != TIMED_ON:
        notes[0] += (
            f"; its kernels are compiled for {arch} and not timed there: rates are what the best"
            " published kernels reach"
        )
    unable = list(not_run(best.layouts))
    if unable:
        notes.append(
            f"{'; '.join(unable)}: --emit vllm or sglang prints the nearest that serves today"
        )
    if layout.replicas > 1:
        each = layout.group * layout.pipeline
        gpus = "one GPU" if each == 1 else f"{each} GPUs"
        notes.append(
            f"{layout.replicas} servers, each on {gpus} of its own: --emit metainfer prints the"
            " command of each"
        )
    if layout.group * layout.pipeline > 1:
        notes.append("several ranks of this engine ran on CPUs so far, not on GPUs")
    return notes
