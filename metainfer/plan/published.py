"""Published measurements of models on machines (data/published.json) as questions to the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metainfer.arch.shape_of import read_shape
from metainfer.arch.shapes import ModelShape
from metainfer.core.errors import MetainferError
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Gpu, Machine
from metainfer.plan.cost.shape import in_formats
from metainfer.plan.layouts import RELEASED, Formats, Layout, Layouts

_FILE = Path(__file__).parent / "data" / "published.json"

INPUT, OUTPUT, FIRST, CONTEXT = "input tok/s", "output tok/s", "ttft s", "context tokens"
QUANTITIES = (INPUT, OUTPUT, FIRST, CONTEXT)


@dataclass(frozen=True, slots=True)
class Case:
    """A setting of which one quantity is asked.

    Attributes:
        machine: a recorded one.
        model, engine: known names; `engine` is a profile of the cost model.
        layout: of decoding; prompts are divided alike.
        tokens: of a prompt; of a context where decoding is asked.
        requests: at once.
        chunk: rows of the largest prefill step.
        quantity: one of `QUANTITIES`.
        experts: format of routed experts, as `Formats.experts`.
        card: name of the GPUs where they are others than the record's, with `memory_bytes`,
            `multiprocessors` and `capability` where those differ too.
        peers: whether GPUs reach each other's memory, where it is otherwise than recorded.
        curves: those of the record hold; a change of `peers` voids them.
        collectives: of the engine, in place of the profile's.
        missing: kinds of work whose kernels are missing, of an engine that falls back; the others
            run as in "stock".
        pieces: attention of decode steps is left out of graphs.
        splits_queries: as `cost.constants.Profile`, in place of the profile's.
        layers: (first, behind the last) where the model is cut to these.
        vocabulary: rows of the head, where it is cut.
    """

    machine: str
    model: str
    engine: str
    layout: Layout
    tokens: int
    requests: int = 1
    chunk: int = 8192
    quantity: str = INPUT
    experts: str = RELEASED
    card: str = ""
    memory_bytes: int = 0
    multiprocessors: int = 0
    capability: tuple[int, int] | None = None
    peers: bool | None = None
    curves: bool = True
    collectives: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    pieces: bool = False
    splits_queries: bool = False
    layers: tuple[int, ...] = ()
    vocabulary: int = 0

    @property
    def formats(self) -> Formats:
        return Formats(experts=self.experts, chunk_rows=self.chunk)

    @property
    def layouts(self) -> Layouts:
        return Layouts(self.layout, self.layout)


@dataclass(frozen=True, slots=True)
class Published:
    """A measurement. `assumed`: what its source leaves open. `beat`: of the system that metainfer
    sets out to beat. `own`: of this engine. `off`: what is known of why a prediction is far off."""

    id: str
    case: Case
    published: float
    source: str
    assumed: tuple[str, ...]
    beat: bool = False
    own: bool = False
    off: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """Two cases, and the bounds of the first over the second that are right."""

    name: str
    more: Case
    less: Case
    low: float
    high: float
    source: str
    published: str


@dataclass(frozen=True, slots=True)
class Listed:
    """A measurement that is not predicted, and why."""

    machine: str
    model: str
    value: str
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Figures:
    """All of the data file."""

    rows: tuple[Published, ...]
    orders: tuple[Order, ...]
    listed: tuple[Listed, ...]


def read_published() -> Figures:
    given = json.loads(_FILE.read_text(encoding="utf-8"))
    return Figures(
        rows=tuple(_published(row) for row in given["rows"]),
        orders=tuple(
            Order(**{**row, "more": _case(row["more"]), "less": _case(row["less"])})
            for row in given["orders"]
        ),
        listed=tuple(Listed(**row) for row in given["listed"]),
    )


def _published(row: Mapping[str, Any]) -> Published:
    rest = dict(row)
    own = {name: rest.pop(name) for name in ("id", "published", "source", "assumed")}
    own["assumed"] = tuple(own["assumed"])
    of = {name: rest.pop(name) for name in ("beat", "own", "off") if name in rest}
    return Published(**own, **of, case=_case(rest))


def _case(row: Mapping[str, Any]) -> Case:
    given = {**row, "layout": Layout(**row["layout"])}
    for name in ("capability", "collectives", "missing", "layers"):
        if name in given:
            given[name] = tuple(given[name])
    case = Case(**given)
    if case.quantity not in QUANTITIES:
        raise MetainferError(f"'{case.quantity}' is no quantity that is predicted")
    return case


def machine_of_case(case: Case) -> Machine:
    """The recorded machine, with what differs of it in this case."""
    machine = machine_of(case.machine)
    if case.card and not isinstance(machine.gpus, Unknown):
        machine = replace(
            machine, gpus=tuple(_as_card(gpu, case) for gpu in machine.gpus), rates=()
        )
    if case.peers is not None and not isinstance(machine.peers, Unknown):
        peers = tuple(replace(peer, p2p=case.peers) for peer in machine.peers)
        machine = replace(machine, peers=peers)
    if case.peers is not None or not case.curves:
        machine = replace(machine, curves=())
    return machine


def shape_of_case(case: Case) -> ModelShape:
    """The model, cut and converted as this case has it."""
    shape = in_formats(read_shape(case.model), case.formats)
    if case.layers:
        side = replace(shape.side, layers=shape.side.layers[slice(*case.layers)])
        shape = replace(shape, side=side)
    return replace(shape, vocab_size=case.vocabulary or shape.vocab_size)


def _as_card(gpu: Gpu, case: Case) -> Gpu:
    return replace(
        gpu,
        name=case.card,
        memory_bytes=case.memory_bytes or gpu.memory_bytes,
        multiprocessors=case.multiprocessors or gpu.multiprocessors,
        capability=case.capability or gpu.capability,
    )
