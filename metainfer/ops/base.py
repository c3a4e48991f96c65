"""What an operation is: a contract that every backend fulfils, at exact cases, with a cost.

No torch here: planner, coverage and documentation read these records on any machine.

A case holds the static facts of one use of an op (widths, formats, constants); its other sizes
(rows, entries) come with each call. Shapes in the contracts use one letter per dimension:
T rows, D width, H heads, S streams, E entries or experts, K selected, W window, R rope channels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call must at least do: multiplications and additions, and bytes moved once."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Load:
    """The sizes of one call.

    Attributes:
        rows: rows of the step.
        tokens: tokens of the sequence in the cache, seen by the last row.
        sequences: that share the rows of sparse prefill, each of `tokens`; costs are of one.
    """

    rows: int
    tokens: int = 0
    sequences: int = 1


def seen_in_all(load: Load, ratio: int, most: int | None = None) -> int:
    """Entries of `ratio` tokens that the rows of a prefill see, added over its rows: the last
    `load.rows` of `load.tokens`, each of which sees the entries that are complete at its position,
    `most` at most."""

    def up_to(tokens: int) -> int:
        """Sum over n = 1 .. tokens of min(n // ratio, most)."""
        rising = tokens if most is None else min(tokens, most * ratio - 1)
        level = rising // ratio
        total = ratio * level * (level - 1) // 2 + level * (rising - level * ratio + 1)
        return total if most is None else total + most * max(0, tokens - rising)

    return up_to(max(load.tokens, load.rows)) - up_to(max(load.tokens - load.rows, 0))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest difference from the reference, absolute and relative to the largest reference value,
    by format of the products."""

    float32: float = 1e-5
    bfloat16: float = 2e-2

    def of(self, dtype: str) -> float:
        return {"float32": self.float32, "bfloat16": self.bfloat16}[dtype]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        name: "group.operation".
        doc: the contract: formula, arguments and results with shapes and formats.
        cases: uses at the shapes of real models, by model name.
        small_cases: the same variety at sizes that tests can afford.
        tolerance: how far a backend may be from the reference.
        cost: the floor of a call, from its case and its load.
        weights: names of the tensors that `prepare` takes at load; () where there is none.
        version: of the contract; what was measured of one says nothing of another.
    """

    name: str
    doc: str
    cases: dict[str, tuple[Any, ...]]
    small_cases: tuple[Any, ...]
    cost: Callable[[Any, Load], Cost]
    tolerance: Tolerance = Tolerance()
    weights: tuple[str, ...] = ()
    version: int = 1


def case_fields(case: Any) -> dict[str, Any]:
    """The facts of a case as JSON keeps them: lists for tuples, and infinity, for which JSON has no
    number, as the string "inf"."""
    fields = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(case).items()
    }
    plain: dict[str, Any] = json.loads(json.dumps(fields, allow_nan=False))
    return plain


@dataclass(frozen=True, slots=True)
class Target:
    """What code runs on: "cpu", or "cuda" with a compute capability such as (9, 0)."""

    type: str
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.capability is None:
            return self.type
        return f"{self.type}:sm_{self.capability[0]}{self.capability[1]}"
