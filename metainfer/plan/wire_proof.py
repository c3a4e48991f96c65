"""Whether sums over ranks may travel in 8 bits in prefill: as `bench quality` found, or in words.

A verdict counts as those on caches do (`plan.proof`), for the number of ranks that it was found
with: each rounds what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.arch.record import Arch
from metainfer.core.errors import UserError
from metainfer.plan import proof
from metainfer.plan.plan import Origin, Value
from metainfer.plan.proof import (
    SAME,
    Terms,
    doubts_of_any,
    latest_first,
    model_key,
    reason_of,
    terms_of,
    wires_of,
)
from metainfer.plan.settings import EngineSettings
from metainfer.plan.wires import BLOCK, PLAIN, WIRES


@dataclass(frozen=True, slots=True)
class WireProof:
    """The model predicts with such sums what it does with plain ones.

    Attributes:
        wire: one of `plan.wires.WIRES`.
        ranks: of a stage.
        reason: a sentence's end that says when it was found and how near.
        longest: tokens of the longest prompt that was judged.
    """

    wire: str
    ranks: int
    reason: str
    longest: int


def wire_judged(record: Mapping[str, Any]) -> WireProof | str:
    """What `record` proves if it passed: sums of B travel in 8 bits, those of A do not, and all
    else that changes predictions is equal. A string says why it could prove nothing."""
    a, b = wires_of(record)
    doubts = {
        "it does not hold sums in 8 bits against plain ones": a != PLAIN
        or b == PLAIN
        or b not in WIRES,
        **doubts_of_any(record, (*SAME, "cache_dtype", "index_cache_dtype")),
    }
    for doubt, holds in doubts.items():
        if holds:
            return doubt
    ranks = record["sides"]["B"]["receipt"]["plan"]["tensor_parallel_size"]["value"]
    return WireProof(b, ranks, reason_of(record), int(record["longest"]))


def wire_proof(
    directory: Path, settings: EngineSettings, terms: Terms, cache: Path | None = None
) -> WireProof | None:
    """For as many ranks as are asked for. The latest verdict on each wire counts; of those that
    passed, the latest."""
    key = model_key(directory, settings)
    if key is None:
        return None
    seen: set[str] = set()
    for record in latest_first(key, cache or proof.default_cache()):
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            found = wire_judged(record)
            if isinstance(found, str) or found.ranks != settings.tensor_parallel_size:
                continue
            if terms_of(record) != terms:
                continue
            if found.wire not in seen and record["verdict"]["passed"] is True:
                return found
            seen.add(found.wire)
    return None


def wire_dtype(
    arch: Arch, settings: EngineSettings, ranks: int, found: WireProof | None
) -> Value[str]:
    """In which form sums of prefill travel between the ranks of a stage. Raises UserError where the
    flag asks for what cannot be."""
    given, whole = settings.wire_dtype, arch.hidden_size % BLOCK == 0
    if given not in (None, PLAIN):
        why = ""
        if ranks == 1:
            why = "one rank has nobody to add up with"
        elif not whole:
            why = (
                f"{BLOCK} numbers share a scale, and the rows of {arch.name} have"
                f" {arch.hidden_size}"
            )
        if why:
            raise UserError(f"--wire-dtype {given}: {why}", hint="leave it out")
    if given is not None:
        reason = "given with --wire-dtype"
        if given != PLAIN and (found is None or found.wire != given):
            reason += f"; no record of bench quality with {ranks} ranks allows it"
        return Value(given, Origin.FLAG, reason)
    if ranks == 1:
        return Value(PLAIN, Origin.DEFAULT, "one rank has nobody to add up with")
    if found is not None and whole:
        return Value(found.wire, Origin.MEASURED, found.reason)
    reason = f"no record of bench quality with {ranks} ranks allows 8 bits"
    return Value(PLAIN, Origin.DEFAULT, reason)
