"""Kernels that are of several backends: the rows of a call decide which runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Run = Callable[..., Any]

# Where the rows of a step are not the first dimension of the first argument: (argument, dimension).
_ROWS_AT: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "attention.merge": (0, 1),
        "attention.compress_decode": (1, 0),
        "cache.read": (1, 0),
    }
)


def rows_of(op: str, arguments: Sequence[Any]) -> int:
    """Rows of a call with these arguments, prepared weights left out."""
    place, dimension = _ROWS_AT.get(op, (0, 0))
    return _length(arguments[place], dimension)


def by_rows(op: str, weighted: bool, parts: Sequence[tuple[int | None, Run]]) -> Run:
    """Runs the first of `parts` (most rows, run) that takes as many rows as the call has.

    Args:
        weighted: prepared weights are the first argument.
    """
    place, dimension = _ROWS_AT.get(op, (0, 0))
    place += weighted
    *ends, (_, last) = parts

    def run(*arguments: Any) -> Any:
        rows = _length(arguments[place], dimension)
        for most, some in ends:
            if most is None or rows <= most:
                return some(*arguments)
        return last(*arguments)

    return run


def from_held(run: Run, view: Callable[[Any], Any]) -> Run:
    """`run` from weights that another backend prepared, in which `view` finds its own."""
    return lambda held, *arguments: run(view(held), *arguments)


def _length(argument: Any, dimension: int) -> int:
    """Of a tensor, or of the first of a tuple: codes and their scales."""
    tensor = argument[0] if isinstance(argument, tuple) else argument
    return int(tensor.shape[dimension])
