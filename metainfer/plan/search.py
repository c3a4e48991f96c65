"""Search: all layouts of a machine, those that cannot be refused with reasons, the rest ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from metainfer.arch.shapes import ModelShape
from metainfer.core.errors import UserError
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_names
from metainfer.hardware.machine import Machine
from metainfer.plan.candidates import Rejection, candidates, fits_chunk
from metainfer.plan.cost.constants import Constants, Profile, read_constants
from metainfer.plan.cost.phases import Phases
from metainfer.plan.cost.predict import Prediction, predict
from metainfer.plan.cost.shape import BF16, FP4, FP8, expert_format, in_formats, linear_format
from metainfer.plan.layouts import RELEASED, Formats, Layouts
from metainfer.plan.workload import Workload

THROUGHPUT, TTFT, INTERACTIVE = "throughput", "ttft", "interactive"
OBJECTIVES = (THROUGHPUT, TTFT, INTERACTIVE)
SELF = "metainfer"
"""The profile of this engine."""
TIMED_ON = "sm_90"
"""Where its kernels were timed."""
CHUNKS = (2048, 4096, 8192, 16384)
"""Rows of the largest prefill step that are tried."""

_PLACES = ("host", "gpu", "disk")
"""Of n-gram tables, the one that leaves most to caches first."""


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
    """A layout that fits. `why` says of all but the first what they lose by."""

    layouts: Layouts
    formats: Formats
    prediction: Prediction
    ledger: Fits
    why: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """Attributes:
    shape, machine, workload, objective, profile: what was asked.
    ranked: the best first; of layouts that differ in nothing but expert parts, cache shards or
        formats the best.
    rejected: with reasons.
    notes: sentences that hold for all.
    phases: times of steps, to ask for more.
    """

    shape: ModelShape
    machine: Machine
    workload: Workload
    objective: str
    profile: Profile
    ranked: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    notes: tuple[str, ...]
    phases: Phases

    @property
    def best(self) -> Candidate:
        return self.ranked[0]


_Ways = tuple[int, ...]
"""How GPUs are divided, whatever is dealt out within a group."""


@dataclass
class _Found:
    """While searching."""

    fitting: dict[_Ways, Candidate] = field(default_factory=dict)
    refused: dict[_Ways, Rejection] = field(default_factory=dict)

    def refuse(self, ways: _Ways, said: Rejection) -> None:
        """Of variants of one way the one that is nearest to fitting stands for all."""
        known = self.refused.get(ways)
        if known is None or said.missing_bytes < known.missing_bytes:
            self.refused[ways] = said

    def rejections(self) -> list[Rejection]:
        """Of ways to divide GPUs of which no variant fits."""
        return [said for ways, said in self.refused.items() if ways not in self.fitting]


def search(
    shape: ModelShape,
    machine: Machine,
    workload: Workload,
    ledger: Ledger,
    objective: str = THROUGHPUT,
    profile: str = SELF,
    constants: Constants | None = None,
) -> Result:
    """Raises UserError where there is no GPU, where the record says too little of them, or where
    no layout fits, with the reasons."""
    constants = constants or read_constants()
    engine = constants.profile(profile)
    if objective not in OBJECTIVES:
        raise UserError(f"'{objective}' is not one of {', '.join(OBJECTIVES)}")
    gpus = _gpus(machine)
    if workload.longest_context > shape.side.max_model_len:
        raise UserError(
            f"{shape.name} reads {shape.side.max_model_len:,} tokens at most; the workload has"
            f" {workload.longest_context:,}"
        )
    rejected: list[Rejection] = []
    for form in _conversions(shape):
        phases = Phases(in_formats(shape, form), machine, constants, engine)
        if phases.problem:
            raise UserError(
                f"no plan: {phases.problem}", hint="`metainfer probe --measure` records it"
            )
        layouts, refused = candidates(phases.shape, gpus, engine)
        found = _try_all(phases, shape, machine, layouts, workload, form, ledger, objective)
        rejected = [*refused, *found.rejections()]
        if found.fitting:
            ranked = sorted(found.fitting.values(), key=lambda one: _key(objective, one))
            said = tuple(_explained(one, ranked[0], objective) for one in ranked)
            notes = (*_converted(shape, form), *_notes(phases, said[0], workload))
            return Result(
                shape, machine, workload, objective, engine, said, tuple(rejected), notes, phases
            )
    raise UserError(_nothing_fits(shape, gpus, rejected), hint=_nearest(rejected))


def _conversions(shape: ModelShape) -> list[Formats]:
    """The released formats, then smaller ones, where those fit in no layout."""
    found = [Formats()]
    if expert_format(shape) in (BF16, FP8):
        found.append(Formats(experts=FP4))
        if linear_format(shape) == BF16:
            found.append(Formats(experts=FP4, linear=FP8))
    return found


def _converted(shape: ModelShape, form: Formats) -> list[str]:
    if form.experts == RELEASED:
        return []
    also = "" if form.linear == RELEASED else f", its other matrices in {form.linear}"
    return [
        f"{shape.name} as released fits in no layout: planned with experts in {form.experts}{also},"
        " for which a converted checkpoint is needed"
    ]


def _machines() -> str:
    return (
        "--machine takes a record of `metainfer probe --out` or the name of a recorded machine: "
        + ", ".join(machine_names())
    )


def _gpus(machine: Machine) -> int:
    if isinstance(machine.gpus, Unknown):
        raise UserError(
            f"no plan without GPUs: {machine.gpus.why}",
            hint=_machines(),
        )
    if not machine.gpus:
        raise UserError(
            "no plan: this machine has no GPU; on a CPU there is one layout",
            hint=_machines(),
        )
    return len(machine.gpus)


def _try_all(
    phases: Phases,
    released: ModelShape,
    machine: Machine,
    all_layouts: Iterable[Layouts],
    workload: Workload,
    form: Formats,
    ledger: Ledger,
    objective: str,
) -> _Found:
    """For each layout the formats that are best of those that fit."""
    found = _Found()
    for layouts in all_layouts:
        refused = Rejection(
            layouts.name, "a prompt has less than 128 tokens for each rank of its group"
        )
        for options in _options(phases, layouts, workload, form):
            # Of a layout that is too small whatever the chunk, one reason is enough.
            smallest = options[0]
            least = ledger(released, machine, layouts, workload, smallest)
            if not least.fits:
                missing = max(0, least.total_bytes - least.limit_bytes)
                refused = Rejection(layouts.name, least.reason, missing)
                continue
            for formats, prediction in _predicted(phases, layouts, workload, options, objective):
                known = formats is smallest
                fits = least if known else ledger(released, machine, layouts, workload, formats)
                if fits.fits:
                    _keep(found.fitting, Candidate(layouts, formats, prediction, fits), objective)
                    break
            break
        else:
            found.refuse(_ways(layouts), refused)
    return found


def _ways(layouts: Layouts) -> _Ways:
    before, after = layouts.prefill, layouts.decode
    return (before.replicas, before.tensor, before.context, before.pipeline, after.tensor)


def _keep(fitting: dict[_Ways, Candidate], one: Candidate, objective: str) -> None:
    """The best of those that divide GPUs alike."""
    ways = _ways(one.layouts)
    known = fitting.get(ways)
    if known is None or _key(objective, one) < _key(objective, known):
        fitting[ways] = one


def _options(
    phases: Phases, layouts: Layouts, workload: Workload, form: Formats
) -> Iterator[list[Formats]]:
    """What to try in a layout: for each place of n-gram tables, those outside the GPU first,
    chunks that differ for prompts of this length, the smallest first."""
    enough = [size for size in CHUNKS if size < workload.input_tokens * workload.requests_at_once]
    for place in _PLACES if phases.shape.engram is not None else _PLACES[:1]:
        options = [
            replace(form, chunk_rows=size, engram=place)
            for size in CHUNKS[: len(enough) + 1]
            if fits_chunk(layouts, min(size, workload.input_tokens))
        ]
        if options:
            yield options


def _predicted(
    phases: Phases,
    layouts: Layouts,
    workload: Workload,
    options: Sequence[Formats],
    objective: str,
) -> list[tuple[Formats, Prediction]]:
    """The best first."""
    told = [(formats, predict(phases, layouts, formats, workload)) for formats in options]
    return sorted(told, key=lambda option: _rank(objective, option[1]))


def _rank(objective: str, prediction: Prediction) -> tuple[float, ...]:
    """Smaller is better."""
    throughput, ttft, tpot = -prediction.requests_per_s, prediction.ttft_s, prediction.tpot_s
    if objective == TTFT:
        return (ttft, throughput, tpot)
    if objective == INTERACTIVE:
        return (tpot, ttft, throughput)
    return (throughput, ttft, tpot)


def _key(objective: str, one: Candidate) -> tuple[float, ...]:
    # Of equals the one that divides less.
    layout = one.layouts.decode
    parts = layout.expert * layout.kv_shards * one.layouts.prefill.context
    return (*_rank(objective, one.prediction), float(parts))


def _explained(one: Candidate, best: Candidate, objective: str) -> Candidate:
    """With what it loses by."""
    if one is best:
        return one
    mine, other = one.prediction, best.prediction
    parts = {
        THROUGHPUT: _less("requests a second", mine.requests_per_s, other.requests_per_s),
        TTFT: _more("to the first token", mine.ttft_s, other.ttft_s),
        INTERACTIVE: _more("between tokens", mine.tpot_s, other.tpot_s),
    }
    told = [parts[objective]]
    if objective != INTERACTIVE:
        told.append(_largest_loss(one, best, "a prompt token", 1e6, "us", prefill=True))
    if objective != TTFT:
        told.append(_largest_loss(one, best, "a decode step", 1e3, "ms", prefill=False))
    return replace(one, why="; ".join(filter(None, told)))


def _less(what: str, mine: float, best: float) -> str:
    return f"{1 - mine / best:.0%} fewer {what}"


def _more(what: str, mine: float, best: float) -> str:
    return f"{mine / best - 1:.0%} longer {what}"


def _largest_loss(
    one: Candidate, best: Candidate, per: str, scale: float, unit: str, prefill: bool
) -> str:
    """The kind of work that costs most more than in the best layout, both per machine."""

    def times(candidate: Candidate) -> dict[str, float]:
        step = candidate.prediction.prefill if prefill else candidate.prediction.decode
        # Replicas work beside each other: what counts is the time per token of the machine.
        share = scale / candidate.layouts.prefill.replicas if prefill else scale
        return {group: seconds * share for group, seconds in step.by_group().items()}

    mine, other = times(one), times(best)
    groups = {*mine, *other}
    worst = max(groups, key=lambda group: mine.get(group, 0.0) - other.get(group, 0.0))
    lost = mine.get(worst, 0.0) - other.get(worst, 0.0)
    if lost < 0.02 * sum(other.values()):
        return ""
    return f"{worst} {mine.get(worst, 0):.1f} {unit} of {per} against {other.get(worst, 0):.1f}"


def _notes(phases: Phases, best: Candidate, workload: Workload) -> list[str]:
    notes = [*_engine(phases, best)]
    group = best.layouts.decode.group
    links = phases.transfers
    if group > 1 and not links.p2p(group, best.layouts.decode.replicas):
        notes.append(
            "GPUs of a group do not reach each other's memory: exchanges go through host memory"
        )
    load = best.prediction.load
    if load is not None and load > 1.0:
        notes.append(
            f"{workload.request_rate_per_s:g} requests a second are {load:.1f} times what this"
            " machine answers: the queue grows without end"
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
    ranks = layout.group * layout.pipeline
    if ranks > 1:
        notes.append(
            f"this version serves one rank: {ranks} GPUs need more, which come later; --emit vllm"
            " or sglang prints the nearest that serves today"
        )
    elif layout.replicas > 1:
        notes.append(f"this version serves one rank: start {layout.replicas} servers, one a GPU")
    return notes


def _nothing_fits(shape: ModelShape, gpus: int, rejected: Sequence[Rejection]) -> str:
    plural = "GPU" if gpus == 1 else "GPUs"
    return (
        f"no layout of {gpus} {plural} holds {shape.name} for this workload:"
        f" {len(rejected)} were refused"
    )


def _nearest(rejected: Sequence[Rejection]) -> str | None:
    """The layout that lacks least."""
    short = [one for one in rejected if one.missing_bytes] or list(rejected)
    if not short:
        return None
    best = min(short, key=lambda one: one.missing_bytes)
    return f"nearest is {best.name}: {best.reason}"
