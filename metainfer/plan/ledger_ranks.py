"""Ledger of a rank: whether a layout fits, why not and what would help, how much fits at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from metainfer.arch.cache_kinds import BLOCK_TOKENS, blocks_for
from metainfer.arch.record import WeightFormat
from metainfer.arch.shapes import ModelShape
from metainfer.core.units import format_bytes
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine
from metainfer.plan.layouts import RELEASED, Formats, Layout, Layouts
from metainfer.plan.rank_lines import RankLedger
from metainfer.plan.rank_sums import Demand, RankSums, demand_of
from metainfer.plan.weights_by_rank import stored_as
from metainfer.plan.workload import Workload

_SMALL_CHUNK = 2048
_MOST_SEQUENCES = 4096
"""Nobody asks for more at a time on one machine."""


def rank_ledger(
    shape: ModelShape, machine: Machine, layouts: Layouts, workload: Workload, formats: Formats
) -> RankLedger:
    """Memory of the fullest rank, with a reason where it does not fit.

    Raises UserError where the machine has too few GPUs, and for words that are no formats.
    """
    return RankLedgers()(shape, machine, layouts, workload, formats)


def most_context(
    shape: ModelShape, machine: Machine, layouts: Layouts, workload: Workload, formats: Formats
) -> int:
    """Tokens of the longest sequence that fits beside the others of `workload`; 0 where none does.

    Raises UserError: as `rank_ledger`.
    """
    asked = _Asked(shape, machine, layouts, formats, demand_of(workload, layouts))
    return _most_context(RankSums(), asked)


def most_sequences(
    shape: ModelShape, machine: Machine, layouts: Layouts, workload: Workload, formats: Formats
) -> int:
    """Sequences of all replicas that fit at a time, one of each replica as long as the longest;
    0 where none does.

    Raises UserError: as `rank_ledger`.
    """
    asked = _Asked(shape, machine, layouts, formats, demand_of(workload, layouts))
    sums = RankSums()
    each = _most(lambda n: _fits(sums, asked.with_demand(sequences=n)), _MOST_SEQUENCES)
    return each * layouts.decode.replicas


class RankLedgers:
    """`rank_ledger` for many layouts: sums that several of them share are made once."""

    def __init__(self) -> None:
        self._sums = RankSums()

    def __call__(
        self,
        shape: ModelShape,
        machine: Machine,
        layouts: Layouts,
        workload: Workload,
        formats: Formats,
    ) -> RankLedger:
        asked = _Asked(shape, machine, layouts, formats, demand_of(workload, layouts))
        ledger = asked.ledger(self._sums)
        if ledger.fits:
            return ledger
        return replace(ledger, reason=_reason(self._sums, asked, ledger))

    def without_reasons(
        self,
        shape: ModelShape,
        machine: Machine,
        layouts: Layouts,
        workload: Workload,
        formats: Formats,
    ) -> RankLedger:
        """As a call, for who asks whether it fits and not why."""
        asked = _Asked(shape, machine, layouts, formats, demand_of(workload, layouts))
        return asked.ledger(self._sums)

    def most_context(
        self,
        shape: ModelShape,
        machine: Machine,
        layouts: Layouts,
        workload: Workload,
        formats: Formats,
    ) -> int:
        """As the function of this name."""
        asked = _Asked(shape, machine, layouts, formats, demand_of(workload, layouts))
        return _most_context(self._sums, asked)


@dataclass(frozen=True, slots=True)
class _Asked:
    shape: ModelShape
    machine: Machine
    layouts: Layouts
    formats: Formats
    demand: Demand

    def ledger(self, sums: RankSums) -> RankLedger:
        return sums.of(self.shape, self.machine, self.layouts, self.demand, self.formats)

    def with_demand(self, **changes: int) -> _Asked:
        return replace(self, demand=replace(self.demand, **changes))

    def with_formats(self, **changes: Any) -> _Asked:
        return replace(self, formats=replace(self.formats, **changes))

    def with_layout(self, change: Callable[[Layout], Layout]) -> _Asked:
        both = Layouts(change(self.layouts.prefill), change(self.layouts.decode))
        return replace(self, layouts=both)


def _fits(sums: RankSums, asked: _Asked) -> bool:
    return asked.ledger(sums).fits


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, 0 where none does; fewer never need more."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _most_context(sums: RankSums, asked: _Asked) -> int:
    longest, typical = asked.shape.side.max_model_len, asked.demand.typical

    def fits(blocks: int) -> bool:
        tokens = blocks * BLOCK_TOKENS
        return _fits(sums, asked.with_demand(longest=tokens, typical=min(tokens, typical)))

    return min(longest, _most(fits, blocks_for(longest)) * BLOCK_TOKENS)


def _reason(sums: RankSums, asked: _Asked, ledger: RankLedger) -> str:
    """One line: what is largest, and what would help; each remedy was put to the test."""
    if ledger.free_bytes >= 0:
        return (
            f"the host would need {format_bytes(ledger.host_bytes)} and has"
            f" {format_bytes(ledger.host_limit_bytes or 0)} to give:"
            " keep Engram tables on GPUs or on disk"
        )
    largest = max(ledger.lines, key=lambda line: line.bytes)
    missing = (
        f"{format_bytes(-ledger.free_bytes)} too much for {format_bytes(ledger.limit_bytes)};"
        f" most are {largest.name}, {format_bytes(largest.bytes)}"
    )
    return f"{missing}: {_remedy(sums, asked, ledger)}"


def _remedy(sums: RankSums, asked: _Asked, ledger: RankLedger) -> str:
    """The first remedy that is enough, else all that change neither requests nor GPUs, else the
    one that frees most."""
    single = list(_remedies(asked))
    for text, changed in single:
        if _fits(sums, changed):
            return f"fits with {text}"
    if context := _most_context(sums, asked):
        return f"contexts of up to {context:,} tokens fit"
    return _joint_remedy(sums, asked) or _best_of(sums, single, ledger)


def _joint_remedy(sums: RankSums, asked: _Asked) -> str:
    """ "" where even together they are not enough."""
    texts, changed = _together(asked)
    listed = ", ".join(texts)
    if _fits(sums, changed):
        return f"fits with {listed}"
    context = _most_context(sums, changed)
    return f"with {listed} contexts of up to {context:,} tokens fit" if context else ""


def _best_of(sums: RankSums, single: list[tuple[str, _Asked]], ledger: RankLedger) -> str:
    freed = [(ledger.total_bytes - one.ledger(sums).total_bytes, text) for text, one in single]
    most, text = max(freed, default=(0, ""))
    if most <= 0:
        return "more or larger GPUs would help"
    return f"nothing alone is enough; {text} would free {format_bytes(most)}"


_Remedy = tuple[str, Callable[["_Asked"], "_Asked | None"]]


def _shard_caches(asked: _Asked) -> _Asked | None:
    group = asked.layouts.decode.group
    if asked.layouts.decode.kv_shards == group:
        return None
    return asked.with_layout(lambda layout: replace(layout, kv_shards=group))


def _engram_to_host(asked: _Asked) -> _Asked | None:
    if asked.shape.engram is None or asked.formats.engram != "gpu":
        return None
    return asked.with_formats(engram="host")


def _heads_in_prefill(asked: _Asked) -> _Asked | None:
    if not asked.layouts.replicates_attention:
        return None
    decode = asked.layouts.decode
    return asked.with_layout(lambda _: decode)


def _smaller_chunk(asked: _Asked) -> _Asked | None:
    if asked.formats.chunk_rows <= _SMALL_CHUNK:
        return None
    return asked.with_formats(chunk_rows=_SMALL_CHUNK)


def _released_latents(asked: _Asked) -> _Asked | None:
    if asked.formats.latents == RELEASED:
        return None
    return asked.with_formats(latents=RELEASED, index_keys=RELEASED)


def _without_draft(asked: _Asked) -> _Asked | None:
    return asked.with_formats(draft=0) if asked.formats.draft else None


def _experts_in_4_bits(asked: _Asked) -> _Asked | None:
    if stored_as(asked.shape, asked.formats).experts in (
        WeightFormat.FP4_GROUP,
        WeightFormat.NVFP4,
    ):
        return None
    return asked.with_formats(experts="mxfp4")


def _larger_group(asked: _Asked) -> _Asked | None:
    """Twice the ranks of a group, in place of replicas where the machine has no more."""
    gpus = asked.machine.gpus
    count = 0 if isinstance(gpus, Unknown) else len(gpus)
    old = asked.layouts.decode
    if 2 * old.group * old.pipeline > count:
        return None
    replicas = min(old.replicas, count // (2 * old.group * old.pipeline))
    sequences = -(-asked.demand.sequences * old.replicas // replicas)
    larger = asked.with_layout(
        lambda layout: replace(layout, tensor=2 * layout.tensor, replicas=replicas)
    )
    return larger.with_demand(sequences=sequences)


_REMEDIES: tuple[_Remedy, ...] = (
    ("caches divided over the ranks of a group (decode context parallel)", _shard_caches),
    ("Engram tables in host memory", _engram_to_host),
    ("heads divided in prefill too", _heads_in_prefill),
    (f"chunks of {_SMALL_CHUNK:,} rows", _smaller_chunk),
    ("coded caches (--kv-cache-dtype released)", _released_latents),
    ("no drafting blocks", _without_draft),
    ("routed experts in 4 bits", _experts_in_4_bits),
    ("twice the GPUs in a group", _larger_group),
    (
        "one sequence at a time",
        lambda asked: asked.with_demand(sequences=1) if asked.demand.sequences > 1 else None,
    ),
)


def _remedies(asked: _Asked) -> Iterator[tuple[str, _Asked]]:
    """Each that can be applied, alone."""
    for text, change in _REMEDIES:
        changed = change(asked)
        if changed is not None:
            yield text, changed


def _together(asked: _Asked) -> tuple[list[str], _Asked]:
    """All of them that change neither requests nor GPUs."""
    texts = []
    for text, change in _REMEDIES[:-2]:
        changed = change(asked)
        if changed is not None:
            texts.append(text)
            asked = changed
    return texts, asked
