"""What `bench comm` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.config import flag, parse_positive
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_least

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
WIRES = ("fp8", "int8")
_LEAST_BYTES = 1024
_GROWTH = 4
_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class CommLoad:
    """Who talks, and how much."""

    ranks: int = flag("--ranks", "Processes that talk to each other", 2, unit="n")
    operations: tuple[str, ...] = flag(
        "--operations", "What they do", OPERATIONS, choices=OPERATIONS, many=True
    )
    max_bytes: int = flag(
        "--max-bytes",
        "The largest tensor of a rank; smaller ones, down to 1 KB, are measured first",
        16 * 2**20,
        unit="bytes",
    )
    wires: tuple[str, ...] = flag(
        "--wires", "Forms of 8 bits in which sums travel too", (), choices=WIRES, many=True
    )
    rounds: int = flag("--rounds", "Samples of each way at each size", 5, unit="n")
    budget_s: float = flag(
        "--budget", "Begin no size after this time", 120.0, unit="seconds", parse=parse_positive
    )

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= _MOST_RANKS:
            raise UserError(f"--ranks {self.ranks}: 2 to {_MOST_RANKS} can talk to each other")
        if self.max_bytes < _LEAST_BYTES:
            raise UserError(f"--max-bytes {self.max_bytes} is less than {_LEAST_BYTES}")
        require_least("--rounds", self.rounds, 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes, rising."""
        found = [_LEAST_BYTES]
        while found[-1] * _GROWTH <= self.max_bytes:
            found.append(found[-1] * _GROWTH)
        return tuple(found)
