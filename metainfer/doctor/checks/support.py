"""Support: whether this engine serves the model here, and which of its flags do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.arch.shapes import ModelShape
from metainfer.doctor.estimate import tensor_layouts, tensor_sizes, workload_of
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.doctor.matrix import TENSOR_PARALLEL, State, matrix
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.plan.layouts import Formats
from metainfer.plan.ledger_ranks import RankLedgers

_SERVES = "this engine"
_FLAGS = "features of this model"


def serves(patient: Patient) -> Iterator[Finding]:
    """One family: said before anything is loaded."""
    shape, machine = patient.shape, patient.machine
    if shape is None:
        return
    first = matrix(shape, machine)[0]
    if first.state is not State.WORKS:
        yield Finding(
            _SERVES,
            Level.WARN,
            f"metainfer does not serve {shape.name} yet",
            first.why,
            "findings here hold for vLLM and SGLang on this machine",
            "`metainfer doctor MODEL --matrix` lists what is here and what comes",
        )
    elif gpus_of(machine):
        yield _on_cards(shape, machine)


def _on_cards(shape: ModelShape, machine: Machine) -> Finding:
    """On one card, or over several where this engine does that."""
    ledgers, work, formats = RankLedgers(), workload_of(shape), Formats()
    alone = ledgers(shape, machine, tensor_layouts(1, 1), work, formats)
    if alone.fits:
        return Finding(_SERVES, Level.OK, f"metainfer serves {shape.name} on one of the cards",
                       "its ledger fits")  # fmt: skip
    several = next(cell for cell in matrix(shape, machine) if cell.feature == TENSOR_PARALLEL)
    if several.state is State.WORKS:
        gpus = len(gpus_of(machine))
        for size in tensor_sizes(shape, gpus):
            if ledgers(shape, machine, tensor_layouts(size, gpus), work, formats).fits:
                return Finding(
                    _SERVES, Level.OK, f"metainfer serves {shape.name} over {size} of the cards",
                    f"its ledger fits; {several.why}",
                    fix=f"metainfer serve {shape.name} --tensor-parallel-size {size}",
                )  # fmt: skip
    return Finding(
        _SERVES,
        Level.WARN,
        f"{shape.name} does not fit on these cards, whatever number of them divides its heads",
        alone.reason,
        "`metainfer serve` would refuse to start",
        "more cards; `metainfer plan` says how to divide it otherwise",
    )  # fmt: skip


def flags(patient: Patient) -> Iterator[Finding]:
    """No silent no-op: what has no effect for this model is said."""
    shape = patient.shape
    if shape is None:
        return
    cells = matrix(shape, patient.machine)
    by_state = {state: [cell.feature for cell in cells if cell.state is state] for state in State}
    told = [f"{state}: {', '.join(names)}" for state, names in by_state.items() if names]
    idle = by_state[State.NO_EFFECT]
    what = f"without effect for {shape.name} here: {', '.join(idle)}" if idle else (
        f"no feature is without effect for {shape.name}"
    )  # fmt: skip
    yield Finding(_FLAGS, Level.OK, what, "; ".join(told), fix="`metainfer doctor MODEL --matrix`")


CHECKS = (
    Check(_SERVES, "Does this engine serve the model on one of these cards?", serves),
    Check(_FLAGS, "Which features work, are refused or do nothing for this model?", flags),
)
