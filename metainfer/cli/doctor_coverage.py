"""Kernel coverage for the doctor: what kernels know of a model and a card, as plain records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from metainfer.cli.kernels_coverage import kinds_of
from metainfer.cli.terminal import Terminal
from metainfer.core.errors import UserError
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine

if TYPE_CHECKING:
    from metainfer.ops.use import Use

_MOST_WORKERS = 16


def coverage_of(
    terminal: Terminal, model: str, machine: Machine, sizes: Sequence[int], compiles: bool
) -> Mapping[int, Mapping[str, Any]] | Unknown:
    """Reports by ranks of tensor parallelism, or why there are none.

    Args:
        compiles: prove that all code fits the card; else backends' own verdicts are enough.
    """
    from metainfer.kernels.on_paper import has_triton

    try:
        if not has_triton():
            return Unknown("triton is not installed: pip install 'metainfer[kernels]'")
        kinds = kinds_of(machine, machine.system)
    except UserError as error:
        return Unknown(error.message)
    if len(kinds) > 1:
        return Unknown(f"the cards are of {len(kinds)} kinds: {', '.join(kinds)}")
    ((target, kind),) = kinds.items()
    return _reports(terminal, model, target, kind, sizes, compiles)


def _forms(model: str, ranks: int) -> tuple[Iterable[Use], Iterable[Use]]:
    """What a GPU binds by itself, which rounds rows of quantised matrices; and the forms without,
    which layers bind only where a flag says so."""
    from metainfer.ops.uses import uses_of

    others = (replace(use, served=False) for use in uses_of(model, ranks))
    return uses_of(model, ranks, activations="fp8"), others


def _reports(
    terminal: Terminal, model: str, target: str, kind: Any, sizes: Sequence[int], compiles: bool
) -> dict[int, Mapping[str, Any]]:
    from metainfer.arch.families import read_attention
    from metainfer.hardware.probe import probe
    from metainfer.kernels.coverage import Request, cover
    from metainfer.kernels.coverage_report import Subject, cards_that_ran, report
    from metainfer.kernels.verdicts import verdict_report
    from metainfer.ops.use import merged

    subjects = {ranks: Subject(model, ranks, "", target, kind) for ranks in sizes}
    uses = {ranks: merged(*_forms(model, ranks)) for ranks in sizes}
    ran = cards_that_ran(target)
    if not compiles:
        return {ranks: verdict_report(subjects[ranks], uses[ranks], ran) for ranks in sizes}
    longest = read_attention(model).max_model_len
    requests = [Request(uses[ranks], kind, longest) for ranks in sizes]
    workers = min(_MOST_WORKERS, probe().cpu.logical_cores)
    with terminal.progress("compiled", "pieces of code") as progress:
        found = cover(requests, workers, on_progress=progress.update)
    return {
        ranks: report(subjects[ranks], rows, ran) for ranks, rows in zip(sizes, found, strict=True)
    }
