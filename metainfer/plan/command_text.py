"""Commands as text: over lines that fit, none of its words broken; from files that hold one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from metainfer.core.errors import UserError

_MOST_BYTES = 10**6
"""Of a file with a command; the longest that people posted has a few thousand."""


def command_lines(command: str, width: int, indent: str = "") -> list[str]:
    """A command over lines of at most `width` columns where its words allow it, each but the last
    with the backslash that joins it to the next. A flag stays with its first value."""
    lines: list[str] = []
    line = indent
    for part in _parts(shlex.split(command)):
        joined = part if not line.strip() else f"{line} {part}"
        joined = indent + part if joined is part else joined
        if line.strip() and len(joined) > width - 2:
            lines.append(f"{line} \\")
            line = f"{indent}  {part}"
        else:
            line = joined
    return [*lines, line]


def _parts(words: Sequence[str]) -> list[str]:
    parts: list[str] = []
    flag = False
    for word in words:
        quoted = shlex.quote(word)
        if flag and not word.startswith("-"):
            parts[-1] += f" {quoted}"
            flag = False
        else:
            parts.append(quoted)
            flag = word.startswith("-") and "=" not in word
    return parts


def text_of_command(given: str) -> str:
    """`given`, or what is in the file of that name. Raises UserError where that cannot be read, or
    is no command's."""
    return _text_of_file(given) if _names_a_file(given) else given


def _names_a_file(text: str) -> bool:
    try:
        return "\n" not in text and Path(text).is_file()
    except (OSError, ValueError):  # a long command is no name of a file
        return False


def _text_of_file(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            read = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"--from: {name} cannot be read: {error.strerror}") from error
    if len(read) > _MOST_BYTES:
        raise UserError(
            f"--from: {name} has more than {_MOST_BYTES // 10**6} MB, which no command has",
            hint="name a file that holds the command alone",
        )
    return read.decode("utf-8-sig", errors="replace")
