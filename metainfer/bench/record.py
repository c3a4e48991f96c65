"""What every benchmark record says besides its figures, and how a record is written."""

from __future__ import annotations

import json
import platform
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from metainfer.core.env import read_environment
from metainfer.core.errors import UserError
from metainfer.hardware.probe import read_versions

WIDTH = 100
"""Columns of a page of text."""
_GAP = "  "


def provenance() -> dict[str, Any]:
    """Machine, versions, commit, command line and date of this process."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["metainfer", *sys.argv[1:]],
        "commit": commit(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of metainfer, Python, the system, and the packages that are installed."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {**read_versions(), "system": system}


def commit() -> str:
    """The commit of the source tree, with "+" behind it if files differ; outside one that of
    METAINFER_COMMIT, or "unknown"."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return read_environment().get("METAINFER_COMMIT", "unknown")
    try:
        return _git(root, "rev-parse", "HEAD") + (
            "+" if _git(root, "status", "--porcelain") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record whole or not at all. Raises OSError."""
    write_whole(path, (json.dumps(record, indent=2) + "\n").encode())


def check_place(path: Path, flag: str) -> None:
    """Raises UserError naming `flag` where `write_whole` could not write `path`; writes nothing.
    To be told before hours of measuring, not behind them."""
    if path.is_dir():
        raise UserError(f"{flag}: {path} is a directory", hint="name a file")
    if path.exists() and not path.is_file():
        return
    place = next(parent for parent in path.parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"{flag}: nothing can be written in {place}: {reason}", hint="choose another directory"
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, readable by whom the umask says. What is there and no file
    (a device, a pipe) is written to and not replaced. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # of a directory, the system says so
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with unfinished.open("xb") as file:
            file.write(data)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first one left, the others right. Where they take more than a page, the widest
    ones are broken at blanks; where words alone do, columns stand closer."""
    widths = _fitting([[line[n] for line in (header, *rows)] for n in range(len(header))])
    gap = _GAP if sum(widths) + len(_GAP) * (len(widths) - 1) <= WIDTH else " "
    rule = gap.join("-" * width for width in widths)
    lines = [*_aligned(header, widths, gap), rule]
    for row in rows:
        lines += _aligned(row, widths, gap)
    return "\n".join(lines)


def prose(text: str, indent: str = "") -> str:
    """Lines that fit a page, those behind the first indented; words stay whole."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fitting(columns: Sequence[Sequence[str]]) -> list[int]:
    """Width of each column; less than that of its longest cell where a page is too narrow."""
    widths = [max(map(len, cells)) for cells in columns]
    least = [
        max((len(word) for cell in cells for word in cell.split()), default=0) for cells in columns
    ]
    over = sum(widths) + len(_GAP) * (len(widths) - 1) - WIDTH
    while over > 0:
        widest = max(range(len(widths)), key=lambda n: (widths[n] > least[n], widths[n]))
        if widths[widest] == least[widest]:
            break  # words are longer than a page has room for
        widths[widest] -= 1
        over -= 1
    return widths


def _aligned(cells: Sequence[str], widths: Sequence[int], gap: str) -> list[str]:
    """One row, as many lines as its longest cell takes."""
    broken = [
        [cell]
        if len(cell) <= width
        else textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = []
    for parts in zip_longest(*broken, fillvalue=""):
        first, *others = (
            part.rjust(width) if n else part.ljust(width)
            for n, (part, width) in enumerate(zip(parts, widths, strict=True))
        )
        lines.append(gap.join([first, *others]).rstrip())
    return lines


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    return done.stdout.strip()
