"""Parts: the records of what a rank computes, which `plan.cost.work` counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

ATTENTION, INDEXER, PRODUCTS, EXPERTS = "attention", "indexer", "products", "experts"
STREAMS, SMALL, HEAD = "streams", "norms and rounding", "head"
GROUPS = (ATTENTION, INDEXER, PRODUCTS, EXPERTS, STREAMS, SMALL, HEAD)
"""What time is told by."""

COPY = "copy"
"""Work that is bound by bytes alone."""


@dataclass(frozen=True, slots=True)
class Part:
    """One or several calls of a kind.

    Attributes:
        group: of `GROUPS`.
        work: whose rate holds: "product fp8", "experts fp4", "attention bf16", "index fp8", `COPY`.
        rows: of the operand that grows with tokens.
        width: of the narrower side of a weight that ranks divide; 0 where it does not matter.
        flops, bytes: of all calls together.
        between: bytes that pass between the operations of one kernel: keys of attention, which rows
            read one list at a time, most of them from the L2 cache; scores of the indexer.
        calls: kernels that run one after the other.
    """

    group: str
    work: str
    rows: float
    flops: float
    bytes: float
    calls: float = 1.0
    between: float = 0.0
    width: int = 0

    def times(self, count: float) -> Part:
        return replace(
            self,
            flops=self.flops * count,
            bytes=self.bytes * count,
            calls=self.calls * count,
            between=self.between * count,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of a step.

    Attributes:
        rows: of the whole group.
        tokens: of a sequence, seen by its last row.
        sequences: that the rows belong to.
        decode: each row is the last of a sequence of its own.
        tensor, context: ranks that divide heads, and rows.
        expert, slices: parts of the group that deal out experts, and ranks that divide one.
        kv_shards: ranks that divide entries.
        skew: rows of the busiest part over the mean.
        coded: caches and activations are bytes: the card multiplies e4m3.
        replays: a prompt leaves out what it need not run (`shape.replays_from`).
        scorers: ranks that divide the indexer's rows.
    """

    rows: int
    tokens: int
    sequences: int
    decode: bool
    tensor: int
    context: int
    expert: int
    slices: int
    kv_shards: int = 1
    skew: float = 1.0
    coded: bool = True
    replays: bool = True
    scorers: int = 1

    @property
    def own_rows(self) -> float:
        return self.rows / self.context


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts of one kind and size as one."""
    sums: dict[tuple[str, str, float, int], Part] = {}
    for part in parts:
        key = (part.group, part.work, part.rows, part.width)
        known = sums.get(key)
        sums[key] = part if known is None else _added(known, part)
    return tuple(sums.values())


def _added(one: Part, other: Part) -> Part:
    return replace(
        one,
        flops=one.flops + other.flops,
        bytes=one.bytes + other.bytes,
        calls=one.calls + other.calls,
        between=one.between + other.between,
    )
