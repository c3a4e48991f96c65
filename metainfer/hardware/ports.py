"""Ports: which process listens on a TCP port of this machine, since when, and who came later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from metainfer.hardware.facts import Unknown

_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
_MOST_WORDS = 6


@dataclass(frozen=True, slots=True)
class Program:
    """A running process.

    Attributes:
        command: the words of its command line before the first flag with two dashes: what stands
            behind may be a secret.
        age_s: since it was started.
    """

    pid: int
    command: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Port:
    """Attributes:
    number: of the port.
    owner: who listens; None where nobody does.
    later: processes of the same command that were started after the owner, and not by it.
    """

    number: int
    owner: Program | Unknown | None
    later: tuple[Program, ...] = ()


def read_port(root: Path, number: int) -> Port | Unknown:
    """What /proc says of a port. Does not raise.

    Args:
        root: of the file system, "/" but in tests.
    """
    process = root / "proc"
    try:
        inodes = set(_listening(process / "net" / "tcp", number))
        with suppress(FileNotFoundError):  # without IPv6
            inodes |= set(_listening(process / "net" / "tcp6", number))
        uptime_s = float((process / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError) as error:
        return Unknown(f"/proc does not say who listens: {error}")
    if not inodes:
        return Port(number, None)
    pids = sorted(int(path.name) for path in process.iterdir() if path.name.isdigit())
    owners = [pid for pid in pids if inodes & set(_sockets(process / str(pid)))]
    programs = {pid: found for pid in pids if (found := _program(process / str(pid), uptime_s))}
    # A server's workers inherit its socket: the first of them is the server.
    known = [programs[pid] for pid in owners if pid in programs]
    if not known:
        return Port(number, Unknown("its process belongs to another user or container"))
    owner = max(known, key=lambda program: program.age_s)
    return Port(number, owner, tuple(_later(process, owner, list(programs.values()))))


def _listening(path: Path, number: int) -> Iterator[str]:
    """Inodes of sockets that listen on a port."""
    for line in path.read_text().splitlines()[1:]:
        words = line.split()
        if (
            len(words) > 9
            and words[3] == _LISTENS
            and int(words[1].rsplit(":", 1)[1], 16) == number
        ):
            yield words[9]


def _sockets(process: Path) -> Iterator[str]:
    """Inodes of the sockets that a process has open; none where it is not ours to look at."""
    with suppress(OSError):
        for entry in (process / "fd").iterdir():
            with suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _program(process: Path, uptime_s: float) -> Program | None:
    try:
        words = (process / "cmdline").read_text(errors="replace").split("\0")
        started = int(_fields(process)[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    told: list[str] = []
    for word in filter(None, words):
        if word.startswith("--") or len(told) == _MOST_WORDS:
            break
        told.append(word.rsplit("/", 1)[-1] if not told else word)
    return Program(int(process.name), " ".join(told), max(0.0, uptime_s - started))


def _fields(process: Path) -> list[str]:
    """Of its stat file, those behind the name, which may hold anything."""
    return (process / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()


def _later(process: Path, owner: Program, programs: list[Program]) -> Iterator[Program]:
    for one in programs:
        alike = one.command and one.command == owner.command and one.age_s < owner.age_s
        if alike and owner.pid not in _ancestors(process, one.pid):
            yield one


def _ancestors(process: Path, pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            pid = int(_fields(process / str(pid))[1])
        except (OSError, ValueError, IndexError):
            break
    return found
