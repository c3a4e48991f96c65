"""Support: whether this engine serves the model here, and which of its flags do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.doctor.estimate import gpus_of, tensor_layouts, workload_of
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.doctor.matrix import State, matrix
from metainfer.plan.layouts import Formats
from metainfer.plan.ledger_ranks import rank_ledger

_SERVES = "this engine"
_FLAGS = "features of this model"


def serves(patient: Patient) -> Iterator[Finding]:
    """One rank, one family: said before anything is loaded."""
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
        found = rank_ledger(shape, machine, tensor_layouts(1, 1), workload_of(shape), Formats())
        if found.fits:
            yield Finding(_SERVES, Level.OK, f"metainfer serves {shape.name} on one of the cards",
                          "its ledger fits")  # fmt: skip
        else:
            yield Finding(
                _SERVES,
                Level.WARN,
                f"metainfer runs one rank, and {shape.name} does not fit on one of these cards",
                found.reason,
                "`metainfer serve` would refuse to start",
                "vLLM or SGLang on several cards until several ranks are here;"
                " `metainfer plan` says how to divide it",
            )


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
