"""Patterns of log lines: what a known line means, whether it matters, and what to do about it.

They stand in `doctor/data/log_patterns.toml`, which says how an entry is written; adding one
touches that file alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from metainfer.doctor.finding import Level

_FILE = Path(__file__).parents[1] / "data" / "log_patterns.toml"


class During(StrEnum):
    """When a line must come for a pattern to hold."""

    ALWAYS = "always"
    LOADING = "loading"
    SERVING = "serving"


@dataclass(frozen=True, slots=True)
class Bound:
    """A field must lie above or below a number, or another field; what is no number never does."""

    field: str
    above: float | str | None = None
    below: float | str | None = None

    def holds(self, fields: Mapping[str, str]) -> bool:
        value = number(fields.get(self.field, ""))
        above, below = (
            number(fields.get(limit, "")) if isinstance(limit, str) else limit
            for limit in (self.above, self.below)
        )
        if value is None or (above is None) != (self.above is None):
            return False
        if (below is None) != (self.below is None):
            return False
        return (above is None or value > above) and (below is None or value < below)


@dataclass(frozen=True, slots=True)
class Pattern:
    """One known kind of line.

    Attributes:
        needle: text that the line holds; it is looked for before `regex`, because that is fast.
        meaning, matters, fix: sentences with {fields} of the regex, {count}, and {share}.
        source: where what they say is from.
        example: a line of this kind, for tests.
        line_if: what holds of the fields of a line that counts.
        report_if: what holds of the fields in the end, `count` and `share` among them.
        largest: the field by which the line that is shown is chosen; "" for the first line.
        share: (part, rest): fields that are added up; {share} is part / (part + rest) in percent.
    """

    id: str
    engine: str
    level: Level
    needle: str
    regex: re.Pattern[str]
    meaning: str
    matters: str
    fix: str
    source: str
    example: str
    during: During = During.ALWAYS
    line_if: tuple[Bound, ...] = ()
    report_if: tuple[Bound, ...] = ()
    largest: str = ""
    share: tuple[str, ...] = ()

    def match(self, text: str) -> re.Match[str] | None:
        """Where `text` is a line of this kind, its fields aside."""
        return self.regex.search(text) if self.needle in text else None

    def counts(self, fields: Mapping[str, str]) -> bool:
        """Whether a line with these fields counts."""
        return all(bound.holds(fields) for bound in self.line_if)


@dataclass(frozen=True, slots=True)
class Engine:
    """What tells that a log is of an engine.

    Attributes:
        version: its group is the version.
        starts, ready: texts of lines with which a server starts to load, and begins to serve.
    """

    name: str
    needle: str
    version: re.Pattern[str]
    starts: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()

    def may_be_in(self, text: str) -> bool:
        """Whether lines of this text can say anything of the engine."""
        return any(part in text for part in (self.needle, *self.starts, *self.ready))

    def version_in(self, text: str) -> str | None:
        """The version that a line tells, "" where it tells the engine alone."""
        match = self.version.search(text) if self.needle in text else None
        return None if match is None else match[1]

    def serves_after(self, text: str, serving: bool) -> bool:
        """Whether a server serves after this line, if it did before it or not."""
        if any(start in text for start in self.starts):
            return False
        return serving or any(ready in text for ready in self.ready)


@dataclass(frozen=True, slots=True)
class Known:
    """All that is known of logs."""

    engines: tuple[Engine, ...]
    patterns: tuple[Pattern, ...]


def load_known(file: Path = _FILE) -> Known:
    """Read the data file. A mistake in it is a bug, and raises what tomllib or `re` raises."""
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    engines = tuple(_engine(entry) for entry in data["engine"])
    return Known(engines, tuple(_pattern(entry) for entry in data["pattern"]))


def number(text: str) -> float | None:
    """ "1,234" -> 1234.0; None for what is no number."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _engine(entry: Mapping[str, Any]) -> Engine:
    lists = {name: tuple(entry.get(name, ())) for name in ("starts", "ready")}
    return Engine(entry["name"], entry["needle"], re.compile(entry["version"]), **lists)


def _pattern(entry: Mapping[str, Any]) -> Pattern:
    values = dict(entry)
    values["level"] = Level(values["level"])
    values["regex"] = re.compile(values["regex"])
    values["during"] = During(values.get("during", "always"))
    for name in ("line_if", "report_if"):
        values[name] = tuple(Bound(**bound) for bound in values.get(name, ()))
    values["share"] = tuple(values.get("share", ()))
    return Pattern(**values)
