"""Verdicts that were asked for before: to ask kernels takes all of them to be imported, which is
seconds. What they said is kept in the user's cache, and counts for the very same sources, packages
and question. No torch here: that is what is saved.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from metainfer.core.files import replace_file

_PACKAGE = Path(__file__).parents[1]
_PARTS = ("arch", "core", "kernels", "ops")
"""What a verdict can rest on."""
_SUFFIXES = frozenset((".py", ".json", ".toml", ".c", ".cu", ".cuh", ".ptx"))
_VERSIONS = ("torch", "triton")
_KEY = "key"

COMPILERS = ("cc", "gcc", "clang")
"""Of C, as `kernels.native` looks for them: whether there is one decides what runs on a CPU."""


def default_cache() -> Path:
    return Path.home() / ".cache" / "metainfer" / "verdicts"


def key_of(question: Iterable[str]) -> str:
    """Of the question, of all sources that kernels are made of and of the packages that they are
    made with."""
    digest = hashlib.sha256()
    for word in (*question, sys.version, *(f"{name} {_version(name)}" for name in _VERSIONS)):
        digest.update(f"{word}\0".encode())
    for path in _sources():
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def files_in(directory: Path) -> str:
    """What changes when any file of a directory does; "" where there is none."""
    found = []
    with suppress(OSError):
        for path in sorted(directory.iterdir()):
            facts = path.stat()
            found.append(f"{path.name} {facts.st_size} {facts.st_mtime_ns}")
    return "; ".join(found)


def read_kept(name: str, key: str, cache: Path | None = None) -> Any | None:
    """What was kept under `name`; None where nothing was, for another key, or it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads((_path(name, cache)).read_bytes())
        if isinstance(record, dict) and record.get(_KEY) == key:
            return record.get("said")
    return None


def keep(name: str, key: str, said: Any, cache: Path | None = None) -> None:
    """Keep what JSON can say, in place of what was there; where that cannot be, it is asked
    again."""
    path = _path(name, cache)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, json.dumps({_KEY: key, "said": said}).encode())


def _path(name: str, cache: Path | None) -> Path:
    safe = hashlib.sha256(name.encode()).hexdigest()[:16]
    return (cache or default_cache()) / f"{safe}.json"


def _sources() -> Iterator[Path]:
    for part in _PARTS:
        for path in sorted((_PACKAGE / part).rglob("*")):
            if path.suffix in _SUFFIXES:
                yield path


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
