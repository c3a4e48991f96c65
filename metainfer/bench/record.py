"""What every benchmark record says besides its figures, and how a record is written."""

from __future__ import annotations

import json
import platform
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from metainfer.core.errors import UserError
from metainfer.hardware.probe import read_versions


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
    """The commit of the source tree, with "+" behind it if files differ; "unknown" outside one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "unknown"
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
    """Columns: the first one left, the others right."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([aligned(lines[0]), rule, *(aligned(line) for line in lines[1:])])


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    return done.stdout.strip()
