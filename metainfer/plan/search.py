"""Search: all layouts of a machine, those that cannot be refused with reasons, the rest ranked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from metainfer.arch.shapes import ModelShape
from metainfer.core.errors import UserError
from metainfer.core.units import format_bytes
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_names
from metainfer.hardware.machine import Machine
from metainfer.plan.candidates import Rejection, candidates, fits_chunk
from metainfer.plan.choices import SELF, Choices, choices_of, in_caches
from metainfer.plan.cost.constants import Constants, Profile, read_constants
from metainfer.plan.cost.phases import Phases
from metainfer.plan.cost.predict import Prediction, predict
from metainfer.plan.cost.shape import BF16, FP4, FP8, expert_format, in_formats, linear_format
from metainfer.plan.found import (
    INTERACTIVE,
    OBJECTIVES,
    THROUGHPUT,
    TTFT,
    Candidate,
    Fits,
    Ledger,
    explained,
    notes_of,
)
from metainfer.plan.layouts import RELEASED, Formats, Layouts
from metainfer.plan.rank_sums import ENGRAM
from metainfer.plan.speculation import speculated
from metainfer.plan.weights_by_rank import weight_parts
from metainfer.plan.workload import Workload

CHUNKS = (2048, 4096, 8192, 16384)
"""Rows of the largest prefill step that are tried."""

_NEAR = 12
"""Layouts that another choice of formats may bring to the top."""

_PLACES = ("host", "gpu", "disk")
"""Of n-gram tables, the one that leaves most to caches first."""


@dataclass(frozen=True, slots=True)
class Result:
    """Attributes:
    shape, machine, workload, objective, profile, choices: what was asked.
    ranked: the best first; of layouts that differ in nothing but expert parts, cache shards or
        formats the best.
    rejected: with reasons.
    notes: sentences that hold for all.
    """

    shape: ModelShape
    machine: Machine
    workload: Workload
    objective: str
    profile: Profile
    choices: Choices
    ranked: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def phases(self) -> Phases:
        """Of the best."""
        return self.best.phases


_Ways = tuple[int, ...]
"""How GPUs are divided, whatever is dealt out within a group."""


@dataclass
class _Found:
    """While searching."""

    fitting: dict[_Ways, Candidate] = field(default_factory=dict)
    refused: dict[_Ways, Rejection] = field(default_factory=dict)

    def keep(self, one: Candidate, objective: str) -> None:
        """The best of those that divide GPUs alike."""
        ways = _ways(one.layouts)
        known = self.fitting.get(ways)
        if known is None or _key(objective, one) < _key(objective, known):
            self.fitting[ways] = one

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
    choices: Choices | None = None,
    before: Result | None = None,
) -> Result:
    """
    Args:
        choices: of formats and drafting; if not given, those of `profile` without flags or proofs.
        before: of the same question with other choices. What differs little from the best there is
            searched alone, with what did not fit there, and times that are known are not computed
            again.

    Raises UserError where there is no GPU, where the record says too little of them, or where no
    layout fits, with the reasons.
    """
    constants = constants or read_constants()
    engine = constants.profile(profile)
    if objective not in OBJECTIVES:
        raise UserError(f"'{objective}' is not one of {', '.join(OBJECTIVES)}")
    gpus = _gpus(machine)
    if workload.longest_context > shape.side.max_model_len:
        raise UserError(
            f"{shape.name} reads {shape.side.max_model_len:,} tokens at most; the workload has"
            f" {workload.longest_context:,}",
            hint="give less with --workload, such as input=1024,output=128",
        )
    choices = choices or choices_of(shape, profile)
    rejected: list[Rejection] = []
    for form in _conversions(shape):
        found = _Found()
        for caches in choices.caches:
            kept = in_caches(in_formats(shape, form), caches)
            phases = _known_phases(before, kept) or Phases(kept, machine, constants, engine)
            if phases.problem:
                raise UserError(
                    f"no plan: {phases.problem}", hint="`metainfer probe --measure` records it"
                )
            layouts, refused = candidates(phases.shape, gpus, engine)
            question = _Question(phases, shape, machine, workload, ledger, objective, choices)
            worth = [one for one in layouts if before is None or _worth(before, one)]
            question.try_all(worth, caches.into(form), found)
        rejected = [*refused, *found.rejections()]
        if found.fitting:
            ranked = sorted(found.fitting.values(), key=lambda one: _key(objective, one))
            said = tuple(explained(one, ranked[0], objective) for one in ranked)
            notes = (*_converted(shape, form), *notes_of(said[0], workload))
            return Result(
                shape,
                machine,
                workload,
                objective,
                engine,
                choices,
                said,
                tuple(rejected),
                notes,
            )
    hint = "; ".join(filter(None, (_nearest(rejected), _too_few(shape, form, machine))))
    raise UserError(_nothing_fits(shape, gpus, rejected), hint=hint)


def _known_phases(before: Result | None, kept: ModelShape) -> Phases | None:
    if before is None:
        return None
    return next((one.phases for one in before.ranked if one.phases.shape == kept), None)


def _worth(before: Result, layouts: Layouts) -> bool:
    """Not far behind the best of `before`."""
    ways = _ways(layouts)
    return all(ways != _ways(one.layouts) for one in before.ranked[_NEAR:])


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


@dataclass(frozen=True, slots=True)
class _Question:
    """What is tried of each layout, in one format of caches."""

    phases: Phases
    released: ModelShape
    machine: Machine
    workload: Workload
    ledger: Ledger
    objective: str
    choices: Choices

    def try_all(self, all_layouts: Iterable[Layouts], form: Formats, found: _Found) -> None:
        """For each layout the formats that are best of those that fit."""
        for layouts in all_layouts:
            refused = Rejection(layouts.name, self._nothing_to_try(layouts))
            for options in self._options(layouts, form):
                # Of a layout that is too small whatever the chunk, one reason is enough.
                smallest = options[0]
                least = self._fits(layouts, smallest)
                if not least.fits:
                    missing = max(0, least.total_bytes - least.limit_bytes)
                    refused = Rejection(layouts.name, least.reason, missing)
                    continue
                for formats, prediction in self._predicted(layouts, options):
                    fits = least if formats is smallest else self._fits(layouts, formats)
                    if fits.fits:
                        one = Candidate(layouts, formats, prediction, fits, self.phases)
                        found.keep(one, self.objective)
                        break
                break
            else:
                found.refuse(_ways(layouts), refused)

    def _nothing_to_try(self, layouts: Layouts) -> str:
        """Where there are no options."""
        if not self._drafts(layouts):
            return "drafting needs the last layer's results where the first layer runs: no stages"
        return "a prompt has less than 128 tokens for each rank of its group"

    def _drafts(self, layouts: Layouts) -> tuple[int, ...]:
        staged = layouts.decode.pipeline > 1
        return tuple(count for count in self.choices.drafts if not count or not staged)

    def _fits(self, layouts: Layouts, formats: Formats) -> Fits:
        return self.ledger(self.released, self.machine, layouts, self.workload, formats)

    def _options(self, layouts: Layouts, form: Formats) -> Iterator[list[Formats]]:
        """What to try in a layout: for each place of n-gram tables, those outside the GPU first,
        what needs least memory first: few drafted tokens, then chunks, of those that differ for
        prompts of this length."""
        work = self.workload
        enough = [size for size in CHUNKS if size < work.input_tokens * work.requests_at_once]
        drafts = self._drafts(layouts)
        # No sums between ranks, no format of them.
        wires = self.choices.wires if layouts.prefill.group > 1 else self.choices.wires[:1]
        for place in _PLACES if self.phases.shape.engram is not None else _PLACES[:1]:
            options = [
                replace(form, chunk_rows=size, engram=place, wire=wire, draft=draft)
                for draft in drafts
                for wire in wires
                for size in CHUNKS[: len(enough) + 1]
                if fits_chunk(layouts, min(size, work.input_tokens))
            ]
            if options:
                yield options

    def _predicted(
        self, layouts: Layouts, options: Sequence[Formats]
    ) -> list[tuple[Formats, Prediction]]:
        """The best first."""
        told = []
        plain: dict[Formats, Prediction] = {}
        for formats in options:
            undrafted = replace(formats, draft=0)
            if undrafted not in plain:
                plain[undrafted] = predict(self.phases, layouts, undrafted, self.workload)
            prediction = speculated(self.phases, layouts, formats, self.workload, plain[undrafted])
            told.append((formats, prediction))
        return sorted(told, key=lambda option: _rank(self.objective, option[1]))


def _ways(layouts: Layouts) -> _Ways:
    before, after = layouts.prefill, layouts.decode
    return (before.replicas, before.tensor, before.context, before.pipeline, after.tensor)


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


def _nothing_fits(shape: ModelShape, gpus: int, rejected: Sequence[Rejection]) -> str:
    plural = "GPU" if gpus == 1 else "GPUs"
    count = "1 was" if len(rejected) == 1 else f"{len(rejected)} were"
    return f"no layout of {gpus} {plural} holds {shape.name} for this workload: {count} refused"


def _too_few(shape: ModelShape, form: Formats, machine: Machine) -> str:
    """Where weights alone, in their smallest formats, are more than all GPUs hold."""
    if isinstance(machine.gpus, Unknown):
        return ""
    parts = weight_parts(shape, form)
    whole = sum(part.bytes for part in parts if part.group != ENGRAM)
    each = min(gpu.memory_bytes for gpu in machine.gpus)
    if whole < each * len(machine.gpus):
        return ""
    return f"weights of {format_bytes(whole)} take {-(-whole // each)} such GPUs and more"


def _nearest(rejected: Sequence[Rejection]) -> str:
    """The layout that lacks least."""
    short = [one for one in rejected if one.missing_bytes] or list(rejected)
    if not short:
        return ""
    best = min(short, key=lambda one: one.missing_bytes)
    return f"nearest is {best.name}: {best.reason}"
