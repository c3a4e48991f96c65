"""Support of layouts: each plain way to divide a model over the cards of a machine, with what this
engine and others do with it. What a layout cannot change for a model is told apart from what
refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from metainfer.arch.shapes import ModelShape
from metainfer.core.units import format_bytes
from metainfer.doctor.checks.notes import counts
from metainfer.doctor.estimate import STOCK, workload_of
from metainfer.doctor.finding import Patient
from metainfer.doctor.known import read_notes
from metainfer.doctor.matrix import TENSOR_PARALLEL, Cell, State, matrix
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.plan.candidates import refusal
from metainfer.plan.cost.constants import read_constants
from metainfer.plan.cost.phases import Phases
from metainfer.plan.cost.predict import predict
from metainfer.plan.layouts import Formats, Layout, Layouts
from metainfer.plan.ledger_ranks import RankLedgers
from metainfer.plan.rank_lines import RankLedger

_SIZES = (2, 4, 8, 16)
_SELF = "metainfer"
_STOCK_TOLD = f"the engine ({STOCK}) does"
_TOLD = "as plans count them, vLLM and SGLang do"
_CHUNKS = (8192, 4096, 2048)
"""Rows of a prefill step: what engines come with, and smaller ones where that does not fit."""

Verdict = tuple[State, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One layout with one model on one machine.

    Attributes:
        layout: its name, as `metainfer plan` writes it.
        own, others: what this engine does with it today, and vLLM and SGLang; each with a sentence
            without its full stop.
        expected: memory and estimated rates where others run it; "" else.
    """

    layout: str
    own: Verdict
    others: Verdict
    expected: str


def layout_rows(shape: ModelShape, machine: Machine) -> tuple[Row, ...]:
    """Of plain layouts, each with as many replicas as there are cards for; () without cards."""
    gpus = len(gpus_of(machine))
    if not gpus:
        return ()
    judge = _Judge(shape, machine)
    return tuple(judge.row(layouts) for layouts in plain_layouts(gpus))


def plain_layouts(gpus: int) -> Iterator[Layouts]:
    """One way to divide at a time: heads, stages, tokens of prompts, whole experts, caches."""
    one = Layout(replicas=gpus)
    yield Layouts(one, one)
    for size in (size for size in _SIZES if size <= gpus):
        copies = replace(one, replicas=gpus // size)
        heads = replace(copies, tensor=size)
        for both in (
            heads,
            replace(heads, expert=size),
            replace(heads, kv_shards=size),
            replace(copies, pipeline=size),
        ):
            yield Layouts(both, both)
        yield Layouts(replace(copies, context=size), heads)


def idle_flags(shape: ModelShape, machine: Machine) -> tuple[Cell, ...]:
    """Of other engines, which take them for this model and do nothing with them."""
    patient = Patient(machine, shape=shape)
    return tuple(
        Cell("other engines", note.flag, State.NO_EFFECT, note.what)
        for note in read_notes()
        if note.flag and counts(note, patient)
    )


class _Judge:
    """Of one model on one machine."""

    def __init__(self, shape: ModelShape, machine: Machine) -> None:
        self._shape, self._machine = shape, machine
        constants = read_constants()
        self._own, self._stock = constants.profile(_SELF), constants.profile(STOCK)
        self._phases = Phases(shape, machine, constants, self._stock)
        self._ledgers = RankLedgers()
        self._features = {cell.feature: (cell.state, cell.why) for cell in matrix(shape, machine)}

    def row(self, layouts: Layouts) -> Row:
        formats, ledger = self._kept(layouts)
        own = self._first(
            self._idle(layouts),
            _refused(refusal(self._shape, layouts, self._own)),
            _refused("" if ledger.fits else ledger.reason),
            self._today(layouts),
        )
        others = self._first(
            self._idle(layouts),
            _refused(refusal(self._shape, layouts, self._stock).replace(_STOCK_TOLD, _TOLD)),
            _refused("" if ledger.fits else ledger.reason),
            (State.WORKS, "by its ledger; their own gaps are in the findings"),
        )
        runs = others[0] is State.WORKS
        return Row(
            layouts.name, own, others, self._expected(layouts, formats, ledger) if runs else ""
        )

    def _first(self, *verdicts: Verdict | None) -> Verdict:
        return next(verdict for verdict in verdicts if verdict is not None)

    def _kept(self, layouts: Layouts) -> tuple[Formats, RankLedger]:
        """The usual chunk, or a smaller one where that alone fits; the smallest where none does."""
        work = workload_of(self._shape)
        for rows in _CHUNKS:
            formats = Formats(chunk_rows=rows)
            ledger = self._ledgers(self._shape, self._machine, layouts, work, formats)
            if ledger.fits:
                break
        return formats, ledger

    def _idle(self, layouts: Layouts) -> Verdict | None:
        """What asks for something that the model has not."""
        if layouts.decode.kv_shards > 1 and not self._shape.side.owners():
            return State.NO_EFFECT, "the model keeps no entries that could be divided"
        return None

    def _today(self, layouts: Layouts) -> Verdict:
        """What the features that a layout needs say together."""
        before, one = layouts.prefill, layouts.decode
        needed = [("serving", True), (TENSOR_PARALLEL, one.tensor > 1)]
        needed += [("expert parallel (EP)", one.expert > 1)]
        needed += [("pipeline parallel (PP)", one.pipeline > 1)]
        needed += [("context parallel prefill (CP)", before.context > 1)]
        needed += [("decode context parallel (DCP)", one.kv_shards > 1)]
        verdicts = [self._features[name] for name, asked in needed if asked]
        for state, why in verdicts:
            if state is not State.WORKS:
                return state, why
        each = "a server for each card: --device cuda:N and a port of its own"
        return State.WORKS, each if one.replicas > 1 else verdicts[-1][1]

    def _expected(self, layouts: Layouts, formats: Formats, ledger: RankLedger) -> str:
        size = f"{format_bytes(ledger.total_bytes)} of {format_bytes(ledger.limit_bytes)} a card"
        if self._phases.problem:
            return size
        found = predict(self._phases, layouts, formats, workload_of(self._shape))
        return (
            f"{size}; about {found.input_per_s:,.0f} input tok/s, {found.tpot_s * 1e3:.1f} ms"
            " between tokens"
        )


def _refused(reason: str) -> Verdict | None:
    return (State.REFUSED, reason) if reason else None
