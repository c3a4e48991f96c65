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
from metainfer.kernels.verdict_cache import default_cache, files_in, keep, key_of, read_kept

if TYPE_CHECKING:
    from metainfer.kernels.coverage_report import Ran, Subject
    from metainfer.ops.targets import CardKind
    from metainfer.ops.use import Use

_MOST_WORKERS = 16


def coverage_of(
    terminal: Terminal, model: str, machine: Machine, sizes: Sequence[int], compiles: bool
) -> Mapping[int, Mapping[str, Any]] | Unknown:
    """Reports by ranks of tensor parallelism, or why there are none.

    Args:
        compiles: prove that all code fits the card; else backends' own verdicts are enough.
    """
    try:
        kinds = kinds_of(machine, machine.system)
    except UserError as error:
        return Unknown(error.message.removeprefix(f"--machine {machine.system}: "))
    if len(kinds) > 1:
        return Unknown(f"the cards are of {len(kinds)} kinds: {', '.join(kinds)}")
    ((target, kind),) = kinds.items()
    if compiles:
        return _asked(terminal, model, target, kind, sizes, compiles)
    name, key = _question(model, target, kind, sizes)
    said = read_kept(name, key)
    if said is not None:
        return {int(ranks): report for ranks, report in said.items()}
    with terminal.waiting("asking kernels what they take (kept for the next time)"):
        reports = _asked(terminal, model, target, kind, sizes, compiles)
    if not isinstance(reports, Unknown):
        keep(name, key, reports)
    return reports


def dividing(model: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of `sizes` over which this engine can divide the model's operations."""
    return tuple(size for size in sizes if _divides(model, size))


def _divides(model: str, ranks: int) -> bool:
    try:
        _forms(model, ranks)
    except UserError:
        return False
    return True


def _question(model: str, target: str, kind: CardKind, sizes: Sequence[int]) -> tuple[str, str]:
    """The name and the key under which the answer is kept: of the model's own facts, of the card,
    and of what `metainfer verify` kept."""
    from metainfer.arch.shape_of import read_shape

    words = (model, target, repr(kind), repr(tuple(sizes)))
    verified = files_in(default_cache().with_name("verify"))
    return " ".join(words[:2]), key_of((*words, repr(read_shape(model)), verified))


def _asked(
    terminal: Terminal,
    model: str,
    target: str,
    kind: CardKind,
    sizes: Sequence[int],
    compiles: bool,
) -> Mapping[int, Mapping[str, Any]] | Unknown:
    from metainfer.kernels.on_paper import has_triton

    try:
        if not has_triton():
            return Unknown("triton is not installed: pip install 'metainfer[kernels]'")
    except UserError as error:
        return Unknown(error.message)
    return _reports(terminal, model, target, kind, sizes, compiles)


def _forms(model: str, ranks: int) -> tuple[Iterable[Use], Iterable[Use]]:
    """What a GPU binds by itself, which rounds rows of quantised matrices; and the forms without,
    which layers bind only where a flag says so."""
    from metainfer.ops.uses import uses_of

    others = (replace(use, served=False) for use in uses_of(model, ranks))
    return uses_of(model, ranks, activations="fp8"), others


def _reports(
    terminal: Terminal,
    model: str,
    target: str,
    kind: CardKind,
    sizes: Sequence[int],
    compiles: bool,
) -> dict[int, Mapping[str, Any]]:
    from metainfer.kernels.coverage_report import Subject, cards_that_ran
    from metainfer.kernels.verdicts import verdict_report
    from metainfer.ops.use import merged

    subjects = {ranks: Subject(model, ranks, "", target, kind) for ranks in sizes}
    uses = {ranks: merged(*_forms(model, ranks)) for ranks in sizes}
    ran = cards_that_ran(target)
    if not compiles:
        return {ranks: verdict_report(subjects[ranks], uses[ranks], ran) for ranks in sizes}
    return _compiled(terminal, subjects, uses, ran)


def _compiled(
    terminal: Terminal,
    subjects: Mapping[int, Subject],
    uses: Mapping[int, tuple[Use, ...]],
    ran: Ran,
) -> dict[int, Mapping[str, Any]]:
    from metainfer.arch.families import read_attention
    from metainfer.hardware.probe import probe
    from metainfer.kernels.coverage import Request, cover
    from metainfer.kernels.coverage_report import report

    requests = [
        Request(uses[ranks], one.kind, read_attention(one.model).max_model_len)
        for ranks, one in subjects.items()
    ]
    workers = min(_MOST_WORKERS, probe().cpu.logical_cores)
    with terminal.progress("compiled", "pieces of code") as progress:
        found = cover(requests, workers, on_progress=progress.update)
    return {
        ranks: report(one, rows, ran)
        for (ranks, one), rows in zip(subjects.items(), found, strict=True)
    }
