"""Use: one operation at one case, as a rank of a model runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

PREFILL, DECODE = "prefill", "decode"
BOTH = (PREFILL, DECODE)

PARTS = ("attention", "products", "experts", "sampling")
_PART_OF_GROUP = {"linear": "products", "moe": "experts", "sample": "sampling"}


@dataclass(frozen=True, slots=True)
class Use:
    """Attributes:
    phases: "prefill", "decode" or both.
    times: how often one pass through the model runs it.
    served: a layer of a served model binds it; otherwise its kernel is there for a form that no
        layer binds yet.
    """

    op: str
    case: Any
    phases: tuple[str, ...] = BOTH
    times: int = 1
    served: bool = False

    @property
    def part(self) -> str:
        """Of `PARTS`: what is no product with weights, of no experts and no sampling belongs to
        attention."""
        return _PART_OF_GROUP.get(self.op.partition(".")[0], "attention")


class Uses:
    """Collects uses; one that comes again is counted."""

    def __init__(self, served: bool) -> None:
        self._served = served
        self._found: dict[tuple[str, Any], Use] = {}

    def add(self, op: str, case: Any, phases: tuple[str, ...] = BOTH, times: int = 1) -> None:
        if times:
            known = self._found.get((op, case), Use(op, case, (), 0))
            all_phases = _joined(known.phases, phases)
            self._found[op, case] = Use(op, case, all_phases, known.times + times, self._served)

    def all(self) -> tuple[Use, ...]:
        """In order of first appearance."""
        return tuple(self._found.values())


def merged(*parts: Iterable[Use]) -> tuple[Use, ...]:
    """Each (op, case) once, from the first of `parts` that has it."""
    found: dict[tuple[str, Any], Use] = {}
    for part in parts:
        for use in part:
            known = found.setdefault((use.op, use.case), use)
            phases = _joined(known.phases, use.phases)
            if phases != known.phases:
                found[use.op, use.case] = replace(known, phases=phases)
    return tuple(found.values())


def _joined(some: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(phase for phase in BOTH if phase in (*some, *more))
