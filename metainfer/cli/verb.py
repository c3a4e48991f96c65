"""Verb: one command, described by the records that its flags fill; parsing and help of it."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from metainfer.cli.foreign_flags import ELSEWHERE, FOREIGN_FLAGS
from metainfer.core.config import add_flags, flags_of, help_rows, read_flags
from metainfer.core.errors import UserError

_WIDTH = 96


@dataclass(frozen=True, slots=True)
class Verb:
    """One command of the command line.

    Attributes:
        name: "serve", "bench serve".
        summary: one line for the list of verbs, without a full stop.
        records: (title of the group in the help, record type), in the order of the help.
        run: gets the Terminal and one instance of each record, returns the exit code.
        examples: commands to copy.
    """

    name: str
    summary: str
    records: tuple[tuple[str, type], ...]
    run: Callable[..., int]
    examples: tuple[str, ...] = ()


def parse(verb: Verb, arguments: Sequence[str], environment: Mapping[str, str]) -> list[Any]:
    """One instance of each of the verb's records. Raises UserError naming the flag at fault."""
    parser = _Parser(verb)
    namespace, unknown = parser.parse_known_intermixed_args(list(arguments))
    for word in unknown:
        raise _unknown_argument(verb, word)
    try:
        return [read_flags(namespace, record, environment) for _, record in verb.records]
    except UserError as error:
        hint = error.hint or f"metainfer {verb.name} --help describes every flag"
        raise UserError(error.message, hint) from error


def asks_for_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments


def help_text(verb: Verb) -> str:
    """The page that `metainfer VERB --help` prints. No line depends on the terminal."""
    usage = [row for _, record in verb.records for row, _ in help_rows(record) if row[0] != "-"]
    lines = [f"usage: metainfer {' '.join([verb.name, *usage, '[flags]'])}", ""]
    lines += textwrap.wrap(verb.summary + ".", _WIDTH)
    for title, record in verb.records:
        lines += ["", f"{title}:"]
        for written, described in help_rows(record):
            lines.append(f"  {written}")
            lines += textwrap.wrap(
                described,
                _WIDTH,
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
                break_on_hyphens=False,  # a flag stays whole, so that it can be found and copied
            )
    if verb.examples:
        lines += ["", "examples:", *(f"  {example}" for example in verb.examples)]
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """argparse, but mistakes are UserErrors."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(prog=f"metainfer {verb.name}", add_help=False, allow_abbrev=False)
        self._verb = verb
        for _, record in verb.records:
            add_flags(self, record)

    def error(self, message: str) -> NoReturn:
        argument, _, rest = message.removeprefix("argument ").partition(": ")
        sentence = f"{argument.split('/')[0]}: {rest}" if rest else message
        raise UserError(sentence, hint=f"metainfer {self._verb.name} --help describes every flag")


def _unknown_argument(verb: Verb, word: str) -> UserError:
    name = word.partition("=")[0]
    if not name.startswith("-") or name == "-":
        return UserError(
            f"metainfer {verb.name} does not know what to do with '{word}'",
            hint=f"metainfer {verb.name} --help shows what it takes",
        )
    message = f"metainfer {verb.name} has no flag {name}"
    dashed = "--" + name.lstrip("-").replace("_", "-")
    known = list(_flag_names(verb))
    if dashed in known:
        return UserError(message, hint=f"it is spelled {dashed}")
    if dashed in FOREIGN_FLAGS:
        return UserError(message, hint=FOREIGN_FLAGS[dashed])
    if dashed in ELSEWHERE:
        return UserError(message, hint=ELSEWHERE[dashed])
    near = difflib.get_close_matches(dashed, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    return UserError(message, hint=f"{hint}metainfer {verb.name} --help lists all flags")


def _flag_names(verb: Verb) -> Iterator[str]:
    for _, record in verb.records:
        for bound in flags_of(record):
            yield from (n for n in (bound.flag.name, *bound.flag.aliases) if n.startswith("-"))
