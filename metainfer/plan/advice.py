"""Advice: what a set-up of another engine does on a machine, and what would do better."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from metainfer.arch.shapes import ModelShape
from metainfer.core.errors import UserError
from metainfer.core.units import format_bytes
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine
from metainfer.hardware.visible import shown_machine
from metainfer.plan.candidates import refusal
from metainfer.plan.choices import SELF, Caches, in_caches
from metainfer.plan.cost.constants import Constants, Profile, read_constants
from metainfer.plan.cost.phases import Phases
from metainfer.plan.cost.predict import Prediction, predict
from metainfer.plan.cost.shape import in_formats
from metainfer.plan.emit import Emitted, emit
from metainfer.plan.engine_commands import VERDICTS, VLLM, SetUp
from metainfer.plan.found import Fits, Ledger
from metainfer.plan.layouts import RELEASED, Formats
from metainfer.plan.search import Result, search
from metainfer.plan.speculation import (
    ACCEPTED,
    draft_counts,
    most_drafted,
    speculated,
    tokens_text,
)
from metainfer.plan.workload import Workload

_STOCK = "stock"
_SMALL = 0.03
"""Less is no reason to change anything."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Attributes:
    set_up: as it was read.
    workload: as asked, with what the command bounds.
    now: what is predicted of it; None where it cannot run, for `problem`.
    fits: of its fullest GPU; None likewise.
    same: the best of the same engine; None where it has no layout.
    ours: the best of metainfer; None likewise.
    start: how to start `same`; None where that is hardly better.
    notes: sentences.
    """

    set_up: SetUp
    workload: Workload
    now: Prediction | None
    problem: str
    fits: Fits | None
    same: Result | None
    ours: Result | None
    start: Emitted | None
    notes: tuple[str, ...]


def advise(
    set_up: SetUp,
    shape: ModelShape,
    machine: Machine,
    workload: Workload,
    ledger: Ledger,
    objective: str,
    constants: Constants | None = None,
) -> Advice:
    """Raises UserError where the machine has no GPUs or fewer than the set-up needs."""
    constants = constants or read_constants()
    profile = constants.profile(_STOCK)
    if set_up.tuned:
        known = tuple("nccl" if way == "nccl default" else way for way in profile.collectives)
        profile = replace(profile, collectives=known)
    if set_up.eager:
        profile = replace(profile, layer_us=constants.kernel("pieces_us"))
    machine, shown = shown_machine(machine, set_up.visible, "the command's ")
    _require_gpus(set_up, machine)
    workload = _bounded(set_up, workload)
    now, problem, fits = _predicted(set_up, shape, machine, workload, profile, constants, ledger)
    asked = shape, machine, workload, ledger, objective
    same, none = _best(*asked, _STOCK)
    ours, _ = _best(*asked, SELF)
    start = None
    if same is not None and (now is None or _gain(now, same) >= _SMALL):
        start = emit(same, set_up.engine, set_up.model or shape.name, _most_requests(set_up))
    notes = (
        *filter(None, (shown,)),
        *_notes(set_up, shape, none, machine),
        *_others(set_up, start),
    )
    return Advice(set_up, workload, now, problem, fits, same, ours, start, notes)


def _require_gpus(set_up: SetUp, machine: Machine) -> None:
    if isinstance(machine.gpus, Unknown) or not machine.gpus:
        why = f": {machine.gpus.why}" if isinstance(machine.gpus, Unknown) else ""
        raise UserError(
            f"there is no GPU to predict the set-up on{why}",
            hint="--machine takes a record or the name of a recorded machine",
        )
    given = len(machine.gpus)
    if set_up.layout.gpus > given:
        raise UserError(
            f"the command needs {set_up.layout.gpus} GPUs ({set_up.layout.name}) and has {given}",
            hint="name the machine that it runs on with --machine"
            + ("" if set_up.visible is None else ", or look at CUDA_VISIBLE_DEVICES"),
        )


def _bounded(set_up: SetUp, workload: Workload) -> Workload:
    """At most as many requests as the command lets run, and as long as it allows."""
    most = _most_requests(set_up)
    at_once = min(workload.requests_at_once, most or workload.requests_at_once)
    longest = max(workload.longest_context, set_up.context_tokens or 0)
    return replace(workload, requests_at_once=at_once, longest_context=longest)


def _most_requests(set_up: SetUp) -> int | None:
    """That all servers of the command let run; None where it leaves that to the engine."""
    if set_up.engine == VLLM and set_up.requests is not None:
        return set_up.requests * set_up.layout.replicas  # each of vLLM's replicas has as many
    return set_up.requests


def _predicted(
    set_up: SetUp,
    shape: ModelShape,
    machine: Machine,
    workload: Workload,
    profile: Profile,
    constants: Constants,
    ledger: Ledger,
) -> tuple[Prediction | None, str, Fits | None]:
    if set_up.no_peers and not isinstance(machine.peers, Unknown):
        peers = tuple(replace(peer, p2p=False) for peer in machine.peers)
        machine = replace(machine, peers=peers, curves=())
    layouts = set_up.layouts
    # What the set-up shards, its engine can shard.
    able = replace(profile, shards_tokens=True)
    reason = refusal(in_formats(shape, Formats(experts=set_up.experts)), layouts, able)
    if reason:
        return None, reason, None
    drafted = _drafted(set_up, shape)
    formats = Formats(
        experts=set_up.experts,
        latents=set_up.caches or RELEASED,
        chunk_rows=set_up.rows,
        draft=drafted,
    )
    fits = ledger(shape, machine, layouts, workload, formats)
    kept = in_caches(in_formats(shape, formats), Caches(formats.latents))
    phases = Phases(kept, machine, constants, profile)
    if phases.problem:
        return None, phases.problem, fits
    plain = predict(phases, layouts, formats, workload)
    return speculated(phases, layouts, formats, workload, plain), "", fits


def _drafted(set_up: SetUp, shape: ModelShape) -> int:
    """Tokens that it drafts before a step by blocks of the checkpoint; stages draft none."""
    counts = draft_counts(shape)
    if set_up.drafts == 0 or not counts or set_up.layout.pipeline > 1:
        return 0
    return min(set_up.drafts or counts[0], most_drafted(shape))


def _best(
    shape: ModelShape,
    machine: Machine,
    workload: Workload,
    ledger: Ledger,
    objective: str,
    profile: str,
) -> tuple[Result | None, str]:
    """And why there is none."""
    try:
        return search(shape, machine, workload, ledger, objective, profile), ""
    except UserError as error:
        return None, f"{error.message} ({error.hint})" if error.hint else error.message


def _notes(set_up: SetUp, shape: ModelShape, none: str, machine: Machine) -> Iterator[str]:
    drafted = _drafted(set_up, shape)
    if drafted:
        yield (
            f"it drafts {tokens_text(drafted)} a step: predicted as if blocks of the checkpoint"
            f" drafted and {ACCEPTED:.0%} of tokens held"
        )
    elif set_up.drafts != 0:
        yield (
            "it drafts tokens, which raises its decode rate: predicted without, for that is not"
            " by blocks of the checkpoint, or it has stages"
        )
    if set_up.caches is None:
        yield "the format of its caches is not known here: predicted as the vendor keeps them"
    if set_up.context > 1:
        yield (
            f"prompts are predicted with their tokens divided over {set_up.context} parts, decoding"
            " with heads divided over all ranks: an engine that repeats attention on each part"
            " decodes no faster than this"
        )
    if set_up.no_peers:
        yield "NCCL_P2P_DISABLE sends its exchanges through host memory; without it, as below"
    if set_up.eager:
        yield (
            "it decodes without graphs: predicted with what the host takes to start the kernels of"
            " attention alone, so its steps take at least that long"
        )
    if not set_up.tuned and set_up.layout.group > 2 and machine.nvlink is not True:
        yield "NCCL_MIN_NCHANNELS=8 raised large sums by 70 % on eight cards (rtx6kpro wiki)"
    if none:
        yield f"no better layout of this engine: {none}"


def _others(set_up: SetUp, start: Emitted | None) -> Iterator[str]:
    """Flags and variables that go on as they are."""
    if start is None:
        return
    taken = {word.partition("=")[0] for word in start.commands[0].split()}
    kept = [
        name
        for name in (
            one.written.split()[0].partition("=")[0] for one in set_up.said if not one.part
        )
        if name not in taken
    ]
    if kept:
        yield f"what of your command is not in the one above goes on as it is: {', '.join(kept)}"


def text(found: Advice) -> str:
    """At most 100 columns, but for words of a command that are longer."""
    lines = [*_flags(found.set_up), *_now(found), *_better(found), *_start(found)]
    for note in found.notes:
        lines += textwrap.wrap(note, 100, initial_indent="note       ", subsequent_indent=" " * 11)
    return "\n".join(lines)


def _start(found: Advice) -> list[str]:
    if found.start is None:
        return []
    return ["", f"Start the better one of {found.set_up.engine} with:", found.start.text(), ""]


def _flags(set_up: SetUp) -> list[str]:
    lines = []
    for verdict in VERDICTS:
        some = [one for one in set_up.said if one.verdict == verdict]
        if some:
            lines.append(f"{verdict}:")
        for one in some:
            told = "; ".join(filter(None, (one.to, one.why)))
            arrow = f" -> {told}" if told else ""
            lines += textwrap.wrap(
                f"{one.written}{arrow}", 100, initial_indent="  ", subsequent_indent="      "
            )
    return [*lines, ""]


def _now(found: Advice) -> list[str]:
    set_up, work = found.set_up, found.workload
    lines = [
        f"workload   {work.input_tokens:,} tokens in, {work.output_tokens:,} out,"
        f" {work.requests_at_once} at once; contexts to {work.longest_context:,}",
        f"as it is   {set_up.engine}, {set_up.layouts.name}, chunks of {set_up.rows:,} rows",
    ]
    if found.now is None:
        lines += textwrap.wrap(
            f"cannot run: {found.problem}", 100, initial_indent=" " * 11, subsequent_indent=" " * 11
        )
        return lines
    lines.append(f"           {_rates(found.now)}")
    if found.fits is not None and not found.fits.fits:
        lines += textwrap.wrap(
            f"by the ledger it does not fit: {found.fits.reason}",
            100,
            initial_indent=" " * 11,
            subsequent_indent=" " * 11,
        )
    elif found.fits is not None:
        lines.append(
            f"           {format_bytes(found.fits.total_bytes)} of"
            f" {format_bytes(found.fits.limit_bytes)} on the fullest GPU"
        )
    return lines


def _better(found: Advice) -> list[str]:
    lines: list[str] = []
    for label, result in (("better", found.same), ("metainfer", found.ours)):
        if result is None:
            continue
        best = result.best
        gain = gain_of(found, result)
        if label == "better" and gain is not None and gain < _SMALL:
            lines.append(f"{label:<11}no layout of this engine is more than {_SMALL:.0%} better")
            continue
        whose = found.set_up.engine if label == "better" else "this engine's own plan"
        more = "" if gain is None else f": {gain:+.0%} requests a second"
        drafts = f", drafting {tokens_text(best.formats.draft)}" if best.formats.draft else ""
        rows = f"chunks of {best.formats.chunk_rows:,} rows"
        told = f"{whose}, {best.layouts.name}, {rows}{drafts}{more}"
        lines += textwrap.wrap(told, 100, initial_indent=f"{label:<11}", subsequent_indent=" " * 11)
        lines.append(f"           {_rates(best.prediction)}")
    return lines


def gain_of(found: Advice, result: Result) -> float | None:
    """Requests a second more than now, as a share; None where nothing runs now."""
    if found.now is None:
        return None
    return _gain(found.now, result)


def _gain(now: Prediction, result: Result) -> float:
    return result.best.prediction.requests_per_s / now.requests_per_s - 1.0


def _rates(told: Prediction) -> str:
    return (
        f"{told.input_per_s:,.0f} input tok/s (+-{told.input_error:.0%}), TTFT"
        f" {told.ttft_told}, TPOT {told.tpot_s * 1e3:.1f} ms"
        f" (+-{told.decode_error:.0%}), {told.requests_per_s:.3g} requests/s"
    )


def record(found: Advice) -> dict[str, Any]:
    """JSON-ready."""
    set_up = found.set_up
    return {
        "version": 1,
        "kind": "advice",
        "engine": set_up.engine,
        "model": set_up.model,
        "layout": asdict(set_up.layout),
        "prompt_parts": set_up.context,
        "caches": set_up.caches,
        "chunk_rows": set_up.rows,
        "flags": [asdict(one) for one in set_up.said],
        "workload": asdict(found.workload),
        "now": None if found.now is None else _numbers(found.now),
        "problem": found.problem,
        "fits": None if found.fits is None else found.fits.fits,
        "better": [
            {
                "engine": result.profile.name,
                "layout": result.best.layouts.name,
                "chunk_rows": result.best.formats.chunk_rows,
                "draft": result.best.formats.draft,
                "gain": gain_of(found, result),
                **_numbers(result.best.prediction),
            }
            for result in (found.same, found.ours)
            if result is not None
        ],
        "start": None if found.start is None else asdict(found.start),
        "notes": list(found.notes),
    }


def _numbers(told: Prediction) -> dict[str, float | None]:
    return {
        "input_tokens_per_s": told.input_per_s,
        "ttft_s": told.ttft_or_none,
        "tpot_s": told.tpot_s,
        "output_tokens_per_s": told.output_per_s,
        "requests_per_s": told.requests_per_s,
        "input_uncertainty": told.input_error,
        "decode_uncertainty": told.decode_error,
    }
