"""What a kept record must hold before anything is read out of it.

A record's hash is no proof of who made it: it may come from a stranger, and says what they like. It
is shown on a terminal and decides what `serve` binds, so its fields are checked first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from metainfer.core.errors import UserError

FieldCheck = Callable[[Any], str]
"""Where in a value something is wrong, as "['name'][2]: what it should be"; "" where nothing is."""


def require_fields(record: Mapping[str, Any], check: FieldCheck) -> None:
    """Raises UserError naming the first field that is missing, or holds what no record does."""
    wrong = check(record)
    if wrong:
        raise UserError(f"the record cannot be read: {wrong.lstrip(': ')}")


def _is(what: str, fits: Callable[[Any], bool]) -> FieldCheck:
    return lambda value: "" if fits(value) else f": it is not {what}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


FLAG = _is("true or false", lambda value: isinstance(value, bool))
COUNT = _is("a whole number from 0 on", lambda value: type(value) is int and value >= 0)
NUMBER = _is("a number from 0 on", lambda value: _number(value) and value >= 0)
POSITIVE = _is("a number above 0", lambda value: _number(value) and value > 0)
TEXT = _is(
    "one line of printable text", lambda value: isinstance(value, str) and value.isprintable()
)


def one_of(names: type) -> FieldCheck:
    """One of the values of an enumeration of strings."""
    values = [str(name) for name in names]  # type: ignore[attr-defined]
    return _is(f"one of {', '.join(values)}", lambda value: value in values)


def maybe(check: FieldCheck) -> FieldCheck:
    """Nothing, or what `check` lets pass."""
    return lambda value: "" if value is None else check(value)


def each(check: FieldCheck) -> FieldCheck:
    """A list, each of whose items `check` lets pass."""

    def check_list(value: Any) -> str:
        if not isinstance(value, list):
            return ": it is not a list"
        return next((f"[{n}]{wrong}" for n, item in enumerate(value) if (wrong := check(item))), "")

    return check_list


def by_name(check: FieldCheck) -> FieldCheck:
    """An object of any printable names, each of whose values `check` lets pass."""

    def check_object(value: Any) -> str:
        if not isinstance(value, dict):
            return ": it is not an object"
        if any(TEXT(name) for name in value):
            return ": a name in it is not printable"
        return next(
            (f"['{name}']{wrong}" for name, item in value.items() if (wrong := check(item))), ""
        )

    return check_object


def fields(**checks: FieldCheck) -> FieldCheck:
    """An object that has these fields, and may have others."""

    def check_object(value: Any) -> str:
        if not isinstance(value, dict):
            return ": it is not an object"
        for name, check in checks.items():
            if name not in value:
                return f"['{name}']: it is missing"
            if wrong := check(value[name]):
                return f"['{name}']{wrong}"
        return ""

    return check_object


def printable(value: Any) -> str:
    """Anything that JSON can say, whose texts are printable: the fields of a case."""
    if isinstance(value, dict):
        return by_name(printable)(value)
    if isinstance(value, list):
        return each(printable)(value)
    return TEXT(value) if isinstance(value, str) else ""


CASE: FieldCheck = by_name(printable)
"""The fields of an operation's case."""


def one_line(text: str) -> str:
    """`text` as `TEXT` lets it pass, whatever a compiler printed."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
