"""Facts: what records of machines are made of, and how they go through JSON and back.

A fact that could not be learnt is `Unknown` and says why; nothing is guessed.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from metainfer.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Unknown:
    """A fact that could not be learnt, and why, in a few words."""

    why: str


NOT_ASKED = Unknown("nobody looked")
"""The fact is not part of what was recorded."""

_MOST = 1e24
"""No number of a machine reaches it, whatever it counts; nor is NaN below it."""
_LONGEST_TEXT = 2**17  # a variable of the environment may be that long
_LONGEST_SHOWN = 60

WRITTEN_BY = (
    "`metainfer probe --out FILE` writes a record that holds; what is not known may be"
    ' {"unknown": "why"} where a field allows it'
)
"""The hint of what is refused in a record."""


def plain(value: Any) -> Any:
    """Records as objects, Unknown as {"unknown": why}."""
    if isinstance(value, Unknown):
        return {"unknown": value.why}
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def record_of(cls: type, given: Mapping[str, Any], path: str = "") -> Any:
    """The record of type `cls` from its plain form; fields with a default may be left out.

    Args:
        path: where it stands, for messages.

    Raises UserError naming what is unknown, missing or of a wrong type.
    """
    hints = _hints(cls)
    names = {f.name for f in fields(cls)}
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    for word, odd in (("unknown", set(given) - names), ("missing", needed - set(given))):
        if odd:
            listed = ", ".join(sorted(path + name for name in odd))
            raise UserError(f"{word} machine fields: {listed}", hint=WRITTEN_BY)
    return cls(**{name: _value(hints[name], given[name], path + name) for name in given})


@cache
def _hints(cls: type) -> Mapping[str, Any]:
    """Types of a record's fields; a machine of 64 GPUs has thousands of records of one kind."""
    return typing.get_type_hints(cls)


def _value(hint: Any, given: Any, path: str) -> Any:
    """The value of type `hint` from its plain form."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return _one_of(arguments, given, path)
    if is_dataclass(hint) and isinstance(given, dict):
        return record_of(typing.cast(type, hint), given, f"{path}.")
    if origin is tuple and isinstance(given, list):
        kinds = arguments[:1] * len(given) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(given):
            items = enumerate(zip(kinds, given, strict=True))
            return tuple(_value(kind, item, f"{path}[{n}]") for n, (kind, item) in items)
    if origin is Mapping and isinstance(given, dict):
        return {key: _value(arguments[1], item, f"{path}.{key}") for key, item in given.items()}
    if type(given) is not hint and not (hint is float and type(given) is int):
        raise UserError(
            f"machine field {path} is {_short(given)}, which is not what stands there",
            hint=WRITTEN_BY,
        )
    if isinstance(given, int | float) and not abs(given) < _MOST:
        raise UserError(
            f"machine field {path} is {_short(given)}, which nothing is", hint=WRITTEN_BY
        )
    if isinstance(given, str) and len(given) > _LONGEST_TEXT:
        raise UserError(f"machine field {path} has {len(given):,} characters", hint=WRITTEN_BY)
    return given


def _short(given: Any) -> str:
    """Of any size, as it is shown in a sentence."""
    text = f"{given:.3e}" if isinstance(given, float) else repr(given)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _one_of(kinds: tuple[Any, ...], given: Any, path: str) -> Any:
    """A value of the first of `kinds`, or where they are among them None and Unknown."""
    if given is None and type(None) in kinds:
        return None
    if Unknown in kinds and isinstance(given, dict) and set(given) == {"unknown"}:
        return Unknown(_value(str, given["unknown"], f"{path}.unknown"))
    return _value(kinds[0], given, path)
