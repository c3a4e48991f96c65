"""Records of the ledger of one rank, which `plan.ledger_ranks` makes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from metainfer.core.units import format_bytes

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Line:
    """One line: what it is, its bytes on the fullest rank, and how the number comes about."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class RankLedger:
    """Memory of the fullest rank.

    Attributes:
        lines: of the GPU, in a fixed order; those of 0 bytes are left out.
        host_lines: of the host's memory, all ranks together.
        limit_bytes: of the smallest GPU that may be taken.
        host_limit_bytes: likewise of the host; None where it is unknown.
        reason: "" where all fits; else one line: what is largest, and what would help.
    """

    lines: tuple[Line, ...]
    host_lines: tuple[Line, ...]
    limit_bytes: int
    host_limit_bytes: int | None
    reason: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def host_bytes(self) -> int:
        return sum(line.bytes for line in self.host_lines)

    @property
    def free_bytes(self) -> int:
        """What is left; negative where it does not fit."""
        return self.limit_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        host = self.host_limit_bytes is None or self.host_bytes <= self.host_limit_bytes
        return self.free_bytes >= 0 and host

    def bytes_of(self, name: str) -> int:
        """Of the line `name`; 0 where there is none."""
        return sum(line.bytes for line in (*self.lines, *self.host_lines) if line.name == name)


def ledger_text(ledger: RankLedger) -> list[str]:
    """The ledger as a table of at most 100 columns."""
    rows = [(line.name, format_bytes(line.bytes), line.why) for line in ledger.lines]
    limit = format_bytes(ledger.limit_bytes)
    rows.append(("in all", format_bytes(ledger.total_bytes), f"of {limit} on the smallest GPU"))
    rows.append(("free", format_bytes(ledger.free_bytes), ledger.reason))
    for line in ledger.host_lines:
        limit_bytes = ledger.host_limit_bytes
        limit = "memory of unknown size" if limit_bytes is None else format_bytes(limit_bytes)
        rows.append((f"host: {line.name}", format_bytes(line.bytes), f"{line.why}; of {limit}"))
    name_width = max(len(name) for name, _, _ in rows)
    size_width = max(len(size) for _, size, _ in rows)
    lines = []
    for name, size, why in rows:
        head = f"{name.ljust(name_width)}  {size.rjust(size_width)}  "
        text = textwrap.wrap(why, _WIDTH - len(head)) or [""]
        lines.append((head + text[0]).rstrip())
        lines += [" " * len(head) + rest for rest in text[1:]]
    return lines
