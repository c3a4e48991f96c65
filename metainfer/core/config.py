"""Flags described where they are used: metadata on the fields of frozen dataclasses.

The command line (`add_flags`, `read_flags`), its help (`help_rows`) and the reference pages all
derive from these records; there is no second list. Owns parsing of values, not what they mean.
"""

from __future__ import annotations

import argparse
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

from metainfer.core.errors import UserError

_METADATA_KEY = "metainfer.flag"
REQUIRED = MISSING
"""The default of a positional argument that must be given."""

AUTO = "auto"
"""The word that leaves a value to the plan: the same as not giving the flag."""

_COUNT = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKmMgG]?)")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class Stability(StrEnum):
    """What may happen to a flag between versions."""

    STABLE = "stable"
    EXPERIMENTAL = "experimental"


@dataclass(frozen=True, slots=True)
class Flag:
    """How one field of a record appears on the command line.

    Attributes:
        name: "--max-model-len", or "MODEL" for a positional argument (which then also has its
            `aliases` as options).
        help: what it does, without a full stop.
        aliases: other spellings, as other engines have them.
        unit: "tokens", "bytes", "seconds"; "" where there is none.
        choices: the words it takes, () for any.
        parse: turns the text into the value and raises UserError or ValueError; None: by type.
        env: the environment variable that stands in when the flag is not given, "" for none.
        many: takes one or more values (each goes through `parse`); the field is a tuple.
    """

    name: str
    help: str
    aliases: tuple[str, ...] = ()
    unit: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    env: str = ""
    many: bool = False
    stability: Stability = Stability.STABLE

    @property
    def positional(self) -> bool:
        return not self.name.startswith("-")


@dataclass(frozen=True, slots=True)
class BoundFlag:
    """A flag together with the record field it fills."""

    flag: Flag
    field_name: str
    kind: Any  # the field's type, without "| None"
    default: Any
    optional: bool  # the field may be None
    required: bool  # there is no default


def flag(
    name: str,
    help: str,
    default: Any = None,
    *,
    aliases: tuple[str, ...] = (),
    unit: str = "",
    choices: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    env: str = "",
    many: bool = False,
    stability: Stability = Stability.STABLE,
) -> Any:
    """A dataclass field that is also a flag; see `Flag` for the arguments.

    Fields with a None default of a numeric type, or with choices, also take the word "auto",
    which is None again.
    """
    description = Flag(name, help, aliases, unit, choices, parse, env, many, stability)
    return field(default=default, metadata={_METADATA_KEY: description})


def flags_of(record: type) -> Iterator[BoundFlag]:
    """The flags of a record type, in the order of its fields; other fields are passed over."""
    hints = typing.get_type_hints(record)
    for f in fields(record):
        description = f.metadata.get(_METADATA_KEY)
        if description is None:
            continue
        kind, optional = _without_none(hints[f.name])
        required = f.default is MISSING
        default = None if required else f.default
        yield BoundFlag(description, f.name, kind, default, optional, required)


def add_flags(parser: argparse.ArgumentParser, record: type) -> None:
    """Teach `parser` the flags of `record`. Values that are not given stay out of the namespace,
    so that the record's own defaults hold and "given" can be told from "default"."""
    for bound in flags_of(record):
        settings: dict[str, Any] = {"default": argparse.SUPPRESS}
        if bound.kind is bool:
            settings["action"] = (
                "store_true" if bound.default is False else argparse.BooleanOptionalAction
            )
        else:
            settings["type"] = value_parser(bound)
            if bound.flag.many:
                settings["nargs"] = "+"
        if bound.flag.positional:
            # Parsed in `read_flags`: argparse would pass the absent value through the parser.
            del settings["type"]
            settings["nargs"] = "*" if bound.flag.many else "?"
            parser.add_argument(bound.field_name, **settings)
            names = bound.flag.aliases
        else:
            names = (bound.flag.name, *bound.flag.aliases)
        if names:
            parser.add_argument(*names, dest=bound.field_name, **settings)


def read_flags(namespace: argparse.Namespace, record: type, environment: Mapping[str, str]) -> Any:
    """An instance of `record`: flags given, else environment variables, else defaults.

    Raises UserError naming what does not parse or is not given.
    """
    values: dict[str, Any] = {}
    for bound in flags_of(record):
        name, value = bound.field_name, getattr(namespace, bound.field_name, None)
        variable = environment.get(bound.flag.env) if bound.flag.env else None
        if bound.flag.positional and (value == "" or (isinstance(value, list) and "" in value)):
            # Of a shell's variable that is not set: what stands for none must not be taken for it.
            raise UserError(f"{bound.flag.name} is empty", hint="leave it out, or say which")
        if bound.flag.positional and isinstance(value, list):
            words = [_parse_named(bound, word, bound.flag.name) for word in value]
            values[name] = tuple(words)
        elif value is not None and bound.flag.positional:
            values[name] = _parse_named(bound, value, bound.flag.name)
        elif value is not None or hasattr(namespace, name):
            values[name] = tuple(value) if isinstance(value, list) else value
        elif variable:
            source = f"environment variable {bound.flag.env}"
            values[name] = _parse_named(bound, variable, source)
        elif bound.required:
            raise UserError(f"{bound.flag.name} is not given")
    return record(**values)


def _parse_named(bound: BoundFlag, text: str, source: str) -> Any:
    """Parse the text of a value and name its source in the error."""
    parse = value_parser(bound)
    words = bound.flag.many and not bound.flag.positional  # those of a command line are separate
    try:
        return tuple(map(parse, text.split())) if words else parse(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{source}: {error}") from error


def value_parser(bound: BoundFlag) -> Callable[[str], Any]:
    """What turns the text of one value into the value; raises argparse.ArgumentTypeError."""
    kind = _item_kind(bound)
    takes_auto = bound.optional and (kind in (int, float) or bool(bound.flag.choices))
    parse = bound.flag.parse or _PARSERS.get(kind, kind)

    def parse_value(text: str) -> Any:
        if takes_auto and text == AUTO:
            return None
        if bound.flag.choices and text not in bound.flag.choices:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not one of {', '.join(bound.flag.choices)}"
            )
        try:
            return parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(error.message) from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{text}' is not {_described(kind)}") from error

    return parse_value


def parse_count(text: str) -> int:
    """An integer; "32k" is 32,000 and "32K" is 32,768, as in vLLM. Raises ValueError."""
    match = _COUNT.fullmatch(text.replace("_", ""))
    if match is None:
        raise ValueError(text)
    number, suffix = match.groups()
    value = Fraction(number) * _FACTORS[suffix]
    if value.denominator != 1:
        raise ValueError(text)
    return int(value)


def parse_positive(text: str) -> float:
    """A number above 0 that is not infinite. Raises ValueError or UserError."""
    value = float(text)
    if not 0 < value < math.inf:
        raise UserError(f"'{text}' is not a number above 0")
    return value


def help_rows(record: type) -> Iterator[tuple[str, str]]:
    """(how it is written, what it does) of each flag, for help and reference pages."""
    for bound in flags_of(record):
        yield written_form(bound), described_form(bound)


def written_form(bound: BoundFlag) -> str:
    """How help shows it: `--max-model-len TOKENS`, `--json`, `[MODEL]`."""
    if bound.flag.positional:
        name = f"{bound.flag.name} ..." if bound.flag.many else bound.flag.name
        return name if bound.required else f"[{name}]"
    names = bound.flag.name
    if bound.kind is bool:
        return names if bound.default is False else f"{names}, --no-{names.removeprefix('--')}"
    word = (
        "|".join(bound.flag.choices) or (bound.flag.unit or _kind_name(_item_kind(bound))).upper()
    )
    word = re.sub(r"[^A-Za-z0-9_|,=+.-]+", "_", word)
    return f"{names} {word}{' ...' if bound.flag.many else ''}"


def described_form(bound: BoundFlag) -> str:
    """The help with default, aliases, variable and stability behind it, in brackets."""
    notes = []
    if bound.default is not None and bound.default is not False and bound.default != ():
        notes.append(f"default {_shown(bound)}")
    if bound.flag.aliases:
        notes.append(f"also {', '.join(bound.flag.aliases)}")
    if bound.flag.env:
        notes.append(f"or {bound.flag.env}")
    if bound.flag.stability is not Stability.STABLE:
        notes.append(str(bound.flag.stability))
    return bound.flag.help + (f" ({'; '.join(notes)})" if notes else "")


def _shown(bound: BoundFlag) -> str:
    """The default as one would type it."""
    if bound.default is True:
        return "on"
    if isinstance(bound.default, tuple):
        return (" " if bound.flag.many else ",").join(map(_typed, bound.default))
    return _typed(bound.default)


def _typed(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_PARSERS: Mapping[Any, Callable[[str], Any]] = types.MappingProxyType(
    {int: parse_count, float: float, str: str, Path: Path}
)


def _described(kind: Any) -> str:
    return {
        int: "a whole number (12, 32k = 32,000, 32K = 32,768)",
        float: "a number",
    }.get(kind, f"a {_kind_name(kind)}")


def _kind_name(kind: Any) -> str:
    return {int: "n", float: "x", str: "text", Path: "path"}.get(
        kind, getattr(kind, "__name__", "")
    )


def _item_kind(bound: BoundFlag) -> Any:
    """`int` of a field `tuple[int, ...]` that takes many values."""
    return typing.get_args(bound.kind)[0] if bound.flag.many else bound.kind


def _without_none(hint: Any) -> tuple[Any, bool]:
    """`int | None` -> (int, True)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(parts) == 1:
            return parts[0], True
    return hint, False
