"""A log against all that is known: which patterns it holds, how often, and what they mean here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from metainfer.doctor.finding import Finding, Level
from metainfer.doctor.logs.lines import Reading, read_lines
from metainfer.doctor.logs.pattern import During, Known, Pattern, number

_WORST_FIRST = (Level.FAIL, Level.WARN, Level.UNKNOWN, Level.OK)
_SHOWN, _BEFORE = 200, 90  # characters of a line, and how many of them may precede what matched
_BATCH_CHARACTERS, _BATCH_LINES = 2**18, 2**11
_SECRET = re.compile(
    r"(?i)((?:api[-_]?key|(?:hf|hub|access|auth)[-_]?token|password|secret)[\w-]{0,16}['\"]?"
    r"\s{0,2}[=:]\s{0,2}[('\"]{0,2}"
    r"|--[\w-]{0,30}(?:key|token|password|secret)['\"]?[,\s]\s{0,2}['\"]?"
    r"|bearer\s{1,2})"
    r"(\[[^\]]{1,400}\]?|[^\s'\",\])]{1,200})"
)
"""Names of keys with what stands behind them: `name=value`, lists of them, `--flag value`."""


@dataclass(slots=True)
class Sighting:
    """The lines of one pattern.

    Attributes:
        first_line, line: the number of the first one, and of the one that is shown.
        text: that one, cut to what matters.
        fields: of that one; all that a regex may leave out is "?".
    """

    pattern: Pattern
    count: int = 0
    first_line: int = 0
    line: int = 0
    text: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    _added: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def see(self, line: int, text: str, match: re.Match[str], fields: dict[str, str]) -> None:
        """Take one more line into account."""
        self.count += 1
        for at, name in enumerate(self.pattern.share):
            self._added[at] += number(fields[name]) or 0.0
        largest = self.pattern.largest
        if self.count == 1:
            self.first_line = line
        elif not largest or (number(fields[largest]) or 0) <= (number(self.fields[largest]) or 0):
            return
        self.line, self.text, self.fields = line, excerpt(text, match.start()), fields

    @property
    def all_fields(self) -> Mapping[str, str]:
        """Fields of the line that is shown, `count` and `share`."""
        part, rest = self._added
        share = {"share": f"{100 * part / (part + rest):.0f}"} if part + rest else {}
        return {**self.fields, "count": str(self.count), **share}

    @property
    def holds(self) -> bool:
        return all(bound.holds(self.all_fields) for bound in self.pattern.report_if)

    def finding(self) -> Finding:
        """What it means, as doctor says everything."""
        pattern, fields = self.pattern, self.all_fields
        where = f"line {self.line:,}"
        if self.count > 1:
            where += f", {self.count:,} such lines from line {self.first_line:,} on"
        return Finding(
            f"log: {pattern.id}",
            pattern.level,
            pattern.meaning.format_map(fields),
            f"{where}: {self.text}",
            pattern.matters.format_map(fields),
            pattern.fix.format_map(fields),
            pattern.source,
        )


@dataclass(frozen=True, slots=True)
class LogReport:
    """What a log says.

    Attributes:
        versions: of engines that the log names, by name.
        sightings: the worst first, then by line.
    """

    reading: Reading
    versions: Mapping[str, str]
    sightings: tuple[Sighting, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(sighting.finding() for sighting in self.sightings)


def scan(
    stream: BinaryIO, known: Known, on_bytes: Callable[[int], None] = lambda _: None
) -> LogReport:
    """Read a log from beginning to end. Raises UserError where it is packed in an unknown way.

    Args:
        on_bytes: called with the bytes read so far.
    """
    reading = Reading()
    versions: dict[str, str] = {}
    seen = {pattern.id: Sighting(pattern) for pattern in known.patterns}
    serving = False
    for batch in _batches(read_lines(stream, reading, on_bytes)):
        # Most lines say nothing: what a thousand of them hold at all is found in one go.
        together = "\n".join(text for _, text in batch)
        patterns = [pattern for pattern in known.patterns if pattern.needle in together]
        engines = [engine for engine in known.engines if engine.may_be_in(together)]
        if not patterns and not engines:
            continue
        for line, text in batch:
            for engine in engines:
                serving = engine.serves_after(text, serving)
                version = engine.version_in(text)
                if version is not None and not versions.get(engine.name):
                    versions[engine.name] = version
            for pattern in patterns:
                _look(line, text, serving, seen[pattern.id])
    found = [sighting for sighting in seen.values() if sighting.count and sighting.holds]
    found.sort(key=lambda one: (_WORST_FIRST.index(one.pattern.level), one.first_line))
    return LogReport(reading, versions, tuple(found))


def _look(line: int, text: str, serving: bool, sighting: Sighting) -> None:
    """Add the line to the sighting, where it is of that kind."""
    pattern = sighting.pattern
    match = pattern.match(text)
    if match is None:
        return
    now = During.SERVING if serving else During.LOADING
    fields = match.groupdict(default="?")
    if pattern.during in (During.ALWAYS, now) and pattern.counts(fields):
        sighting.see(line, text, match, fields)


def _batches(lines: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """The same lines, in lists of bounded size."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for line in lines:
        batch.append(line)
        characters += len(line[1])
        if characters > _BATCH_CHARACTERS or len(batch) >= _BATCH_LINES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def excerpt(text: str, at: int) -> str:
    """The part of a line around what matched at `at`, without keys and control characters."""
    begin = 0 if at <= _BEFORE else at - _BEFORE // 3
    masked = _SECRET.sub(lambda found: found[1] + "*" * len(found[2]), text)
    cut = masked[begin : begin + _SHOWN + 1]
    cut = "".join(c if c.isprintable() else " " for c in cut).rstrip()
    return ("..." if begin else "") + cut[:_SHOWN] + ("..." if len(cut) > _SHOWN else "")
