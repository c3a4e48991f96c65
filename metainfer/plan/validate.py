"""Validation: predictions beside published figures, also with constants set without a machine's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

from metainfer.arch.shape_of import read_shape
from metainfer.arch.shapes import ModelShape
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine
from metainfer.plan.calibrate import Path, Sensitivity, fitted
from metainfer.plan.cost.constants import (
    Calibrated,
    Constants,
    Profile,
    calibrated_values,
    read_constants,
)
from metainfer.plan.cost.phases import Phases
from metainfer.plan.cost.predict import predict
from metainfer.plan.ledger_ranks import most_context
from metainfer.plan.published import (
    CONTEXT,
    FIRST,
    INPUT,
    Case,
    Figures,
    Order,
    Published,
    machine_of_case,
    read_published,
    shape_of_case,
)
from metainfer.plan.workload import Workload

NEAR = 0.3
"""Errors up to it are near."""
_STEP = 0.1
"""By which a constant is moved to see what depends on it."""


@dataclass(frozen=True, slots=True)
class Row:
    """Attributes:
    published: what was measured.
    predicted: with the constants as they ship.
    apart: with those set without figures of this row's machine.
    at_starts: with those that no figure has moved.
    """

    published: Published
    predicted: float
    apart: float
    at_starts: float

    @property
    def error(self) -> float:
        return self.predicted / self.published.published - 1.0

    @property
    def error_at_starts(self) -> float:
        return self.at_starts / self.published.published - 1.0

    @property
    def error_apart(self) -> float:
        return self.apart / self.published.published - 1.0


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order: the ratio as predicted, and the worst of those with a machine's figures left
    out."""

    order: Order
    ratio: float
    ratios_apart: tuple[float, ...]

    @property
    def right(self) -> bool:
        return self.holds(self.ratio)

    @property
    def right_apart(self) -> bool:
        return all(self.holds(ratio) for ratio in self.ratios_apart)

    def holds(self, ratio: float) -> bool:
        return self.order.low < ratio < self.order.high


@dataclass(frozen=True, slots=True)
class Summary:
    """Of absolute errors as shares: their mean, their median, and how many are within 30 %."""

    rows: int
    mean: float
    median: float
    near: int


@dataclass(frozen=True, slots=True)
class Validation:
    """Attributes:
    rows, orders: in the order of the data file.
    constants: (what it is, as it ships, least and most of those set without a machine).
    calibrated: the same constants, with their starts and bounds.
    """

    rows: tuple[Row, ...]
    orders: tuple[Ordered, ...]
    constants: tuple[tuple[str, float, float, float], ...]
    calibrated: tuple[Calibrated, ...]
    figures: Figures


def summary_of(errors: Iterable[float]) -> Summary:
    sizes = sorted(abs(error) for error in errors)
    near = sum(size <= NEAR for size in sizes)
    return Summary(len(sizes), mean(sizes), sizes[len(sizes) // 2], near)


class Asked:
    """Cases, each with its machine and the shape of its model read once."""

    def __init__(self) -> None:
        self._machines: dict[Case, Machine] = {}
        self._shapes: dict[Case, ModelShape] = {}

    def answer(self, case: Case, constants: Constants) -> float:
        """The quantity that a case asks for."""
        if case not in self._machines:
            self._machines[case] = machine_of_case(case)
            self._shapes[case] = shape_of_case(case)
        machine, shape = self._machines[case], self._shapes[case]
        engine = _engine(case, constants)
        if case.quantity == CONTEXT:
            taken = _taken(machine, engine.memory_share)
            workload = Workload(case.tokens, 1, 1)
            return most_context(read_shape(case.model), taken, case.layouts, workload, case.formats)
        phases = Phases(shape, machine, constants, engine)
        told = predict(phases, case.layouts, case.formats, Workload(case.tokens, 1, case.requests))
        if case.quantity == INPUT:
            return told.input_per_s
        return told.ttft_s if case.quantity == FIRST else told.output_per_s


def _taken(machine: Machine, share: float) -> Machine:
    """With GPUs as large as what an engine takes of them."""
    if isinstance(machine.gpus, Unknown):
        return machine
    gpus = tuple(replace(g, memory_bytes=int(share * g.memory_bytes)) for g in machine.gpus)
    return replace(machine, gpus=gpus)


def _engine(case: Case, constants: Constants) -> Profile:
    """The profile, as it runs in this case."""
    profile = constants.profile(case.engine)
    if case.collectives:
        profile = replace(profile, collectives=case.collectives)
    if case.missing:
        fallen = {work: profile.composed[work] for work in case.missing}
        profile = replace(profile, composed=fallen)
    if case.pieces:
        profile = replace(profile, layer_us=constants.kernel("pieces_us"))
    if case.splits_queries:
        profile = replace(profile, splits_queries=True)
    return profile


@cache
def validate() -> Validation:
    """All rows and orders. Some seconds; a second call takes none."""
    asked, figures = Asked(), read_published()
    shipped = calibrated_values()
    constants = read_constants()
    predicted = [asked.answer(row.case, constants) for row in figures.rows]
    found = sensitivity(asked, figures.rows, constants, predicted, shipped)
    apart = list(predicted)
    sets: dict[str, dict[Path, float]] = {}
    for name in sorted({row.case.machine for row in figures.rows}):
        kept = [n for n, row in enumerate(figures.rows) if row.case.machine != name]
        sets[name] = fitted(found, constants.calibrated, shipped, kept)
        others = read_constants(sets[name])
        for place, row in enumerate(figures.rows):
            if row.case.machine == name:
                apart[place] = asked.answer(row.case, others)
    unmoved = read_constants({one.path: one.start for one in constants.calibrated})
    at_starts = [asked.answer(row.case, unmoved) for row in figures.rows]
    return Validation(
        rows=tuple(map(Row, figures.rows, predicted, apart, at_starts)),
        orders=tuple(_ordered(asked, order, constants, sets) for order in figures.orders),
        constants=tuple(
            (one.name, shipped[one.path], *_ends(sets[name][one.path] for name in sets))
            for one in constants.calibrated
        ),
        calibrated=constants.calibrated,
        figures=figures,
    )


def fitted_on_all() -> dict[Path, float]:
    """The calibrated constants as all figures set them, to be put into the data file."""
    asked, figures = Asked(), read_published()
    shipped, constants = calibrated_values(), read_constants()
    predicted = [asked.answer(row.case, constants) for row in figures.rows]
    found = sensitivity(asked, figures.rows, constants, predicted, shipped)
    return fitted(found, constants.calibrated, shipped, range(len(figures.rows)))


def sensitivity(
    asked: Asked,
    rows: Sequence[Published],
    constants: Constants,
    predicted: Sequence[float],
    shipped: Mapping[Path, float],
) -> Sensitivity:
    """Logarithms of predicted over published, and how each calibrated constant moves them."""
    residuals = [math.log(told / row.published) for told, row in zip(predicted, rows, strict=True)]
    slopes: dict[Path, list[float]] = {}
    for one in constants.calibrated:
        moved = read_constants({one.path: shipped[one.path] * (1.0 + _STEP)})
        engines = {
            name for name, profile in moved.profiles.items() if profile != constants.profiles[name]
        }
        slopes[one.path] = [
            math.log(asked.answer(row.case, moved) / told) / math.log(1.0 + _STEP)
            if row.case.engine in engines and row.case.quantity != CONTEXT
            else 0.0
            for row, told in zip(rows, predicted, strict=True)
        ]
    return Sensitivity(residuals, slopes)


def _ordered(
    asked: Asked, order: Order, constants: Constants, sets: Mapping[str, Mapping[Path, float]]
) -> Ordered:
    def ratio(values: Constants) -> float:
        return asked.answer(order.more, values) / asked.answer(order.less, values)

    machines = {order.more.machine, order.less.machine}
    apart = [read_constants(sets[name]) for name in sets if name in machines]
    return Ordered(order, ratio(constants), tuple(ratio(values) for values in apart))


def _ends(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)
