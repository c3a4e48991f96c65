"""What control groups grant this process: memory and processor time, versions 1 and 2.

A limit of any enclosing group binds too, as far up as this process can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Grant:
    """Limits in bytes and cores; None where there is none.

    Attributes:
        memory_bytes: the tightest limit.
        memory_left_bytes: the least that any group with a limit has left. Pages of files that
            could be dropped count as left.
        cores: processor time per time.
    """

    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    cores: float | None = None


def read_grant(root: Path) -> Grant:
    """The limits of this process; `root` is "/" but for tests."""
    memory: list[tuple[int, int]] = []  # (limit, left)
    cores: list[float] = []
    for group in _groups(root, "memory"):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        if limit is not None:
            held = max(0, (used or 0) - _inactive_file_bytes(group))
            memory.append((limit, max(0, limit - held)))
    for group in _groups(root, "cpu"):
        cores += [grant for grant in (_quota_v2(group), _quota_v1(group)) if grant is not None]
    return Grant(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((left for _, left in memory), default=None),
        cores=min(cores, default=None),
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of the groups that hold this process, innermost first."""
    mounts = _mounts(root)
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        key = "" if number == "0" else controller  # "" is version 2, with all controllers
        if (key and controller not in controllers.split(",")) or key not in mounts:
            continue
        mount_point, mount_root = mounts[key]
        try:
            inner = PurePosixPath(own).relative_to(mount_root)
        except ValueError:
            inner = PurePosixPath()  # a container sees its own group as the mount itself
        for part in (inner, *inner.parents):
            if (mount_point / part).is_dir():
                yield mount_point / part


def _mounts(root: Path) -> dict[str, tuple[Path, str]]:
    """Controller ("" for version 2) -> (mount point, which group is mounted there)."""
    found: dict[str, tuple[Path, str]] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        mount = (root / place[4].lstrip("/"), place[3])
        if kind[0] == "cgroup2":
            found.setdefault("", mount)
        elif kind[0] == "cgroup":
            for option in kind[2].split(","):
                found.setdefault(option, mount)
    return found


def _quota_v2(group: Path) -> float | None:
    words = " ".join(_lines(group / "cpu.max")).split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(group: Path) -> float | None:
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def _inactive_file_bytes(group: Path) -> int:
    stat = dict(line.split() for line in _lines(group / "memory.stat") if line.count(" ") == 1)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _number(path: Path) -> int | None:
    """The integer in a file; None if there is none, or the word "max"."""
    try:
        return int(" ".join(_lines(path)))
    except ValueError:
        return None


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
