"""Commands as text that a shell takes: over lines that fit, none of its words broken."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


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
