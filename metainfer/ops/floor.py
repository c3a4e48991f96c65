"""The least time that a call can take: what its cost counts, at the rates of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metainfer.ops.base import Cost

BOUND_TOLD = {"bytes": "bytes", "operations": "math", "launch": "launch"}
"""What sets a floor, as tables say it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine reaches in plain work.

    Attributes:
        bytes_per_s: moved by a large copy, read and written counted both.
        flops_per_s: of a large plain product, by the format of its operands ("float32",
            "bfloat16", and "fp8" where products with it are faster).
        launch_s: time from one empty kernel to the next; no call is faster.
    """

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    launch_s: float

    def floor_s(self, cost: Cost, operands: str) -> float:
        """The longer of moving all bytes once and of doing all operations."""
        return max(cost.bytes / self.bytes_per_s, cost.flops / self.product_rate(operands))

    def product_rate(self, operands: str) -> float:
        """Of the nearest wider format where there is none for `operands`."""
        wider = {"fp8": "bfloat16", "bfloat16": "float32"}
        while operands not in self.flops_per_s:
            operands = wider[operands]
        return self.flops_per_s[operands]

    def bound(self, cost: Cost, operands: str) -> str:
        """What sets the floor: "bytes" or "operations"; "launch" where an empty kernel takes
        longer."""
        if self.floor_s(cost, operands) < self.launch_s:
            return "launch"
        moving = cost.bytes / self.bytes_per_s >= cost.flops / self.product_rate(operands)
        return "bytes" if moving else "operations"


def operands_of(case: Any) -> str:
    """The narrowest format in which the products of a case can be exact."""
    if hasattr(case, "operands"):
        return str(case.operands)
    keys = str(getattr(case, "key_format", ""))
    # e2m1 codes are e4m3 numbers too, so that both multiply as fp8.
    return "fp8" if keys.startswith("index_fp") else str(case.dtype)
