"""Gains: what choices that do not compete would give, and what must be shown before they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from metainfer.arch.record import LayerKind
from metainfer.arch.shapes import ModelShape
from metainfer.core.errors import UserError
from metainfer.core.units import format_bytes
from metainfer.hardware.facts import Unknown
from metainfer.ops.cache_formats import PLAIN
from metainfer.plan.choices import (
    SELF,
    Caches,
    Choices,
    FormatFlags,
    caches_text,
    smaller_caches,
)
from metainfer.plan.cost.predict import OVERLOAD
from metainfer.plan.found import INTERACTIVE, THROUGHPUT, TTFT
from metainfer.plan.layout_flags import axes_of, words_of
from metainfer.plan.layouts import RELEASED, Formats
from metainfer.plan.ledger_ranks import RankLedgers
from metainfer.plan.search import Result, search
from metainfer.plan.speculation import ACCEPTED, draft_counts
from metainfer.plan.weights_by_rank import weight_parts

_QUALITY = "metainfer bench quality"
_LEAST_WINDOW = 1024
_TOLD = 0.005
"""Least change that is told."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Attributes:
    what: the choice, in words.
    flag: that makes it all the same.
    proof: the command that proves it, or a sentence why there is none.
    command: whether `proof` is a command.
    result: the best with this choice; None where no layout fits.
    longest_context: tokens of the longest sequence that then fits.
    """

    what: str
    flag: str
    proof: str
    command: bool
    result: Result | None
    longest_context: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """Attributes:
    longest_context: tokens of the longest sequence that fits in the best layout, beside the
        others of the workload.
    gains: of what was not chosen.
    """

    longest_context: int
    gains: tuple[Gain, ...]


def outlook(result: Result, ledgers: RankLedgers, flags: FormatFlags, model: str) -> Outlook:
    """Of the best layout of `result`.

    Args:
        flags: what they fix is no choice any more.
        model: as `bench quality` is to be told.
    """
    gains = []
    for what, flag, proof, choices in _closed(result, flags, model):
        other = _searched(result, choices, ledgers)
        if choices.caches == result.choices.caches and not _is_better(result, other):
            continue  # caches of fewer bits hold longer contexts even so
        longest = 0 if other is None else _context(other, ledgers)
        command = proof.startswith(_QUALITY)
        gains.append(Gain(what, flag, proof, command, other, longest))
    return Outlook(_context(result, ledgers), tuple(gains))


def _is_better(result: Result, other: Result | None) -> bool:
    """By what was asked for."""
    if other is None:
        return False
    mine, its = result.best.prediction, other.best.prediction
    return {
        THROUGHPUT: its.requests_per_s > mine.requests_per_s,
        TTFT: its.ttft_s < mine.ttft_s,
        INTERACTIVE: its.tpot_s < mine.tpot_s,
    }[result.objective]


def _context(result: Result, ledgers: RankLedgers) -> int:
    best = result.best
    return ledgers.most_context(
        result.shape, result.machine, best.layouts, result.workload, best.formats
    )


def _searched(result: Result, choices: Choices, ledgers: RankLedgers) -> Result | None:
    asked = result.shape, result.machine, result.workload
    try:
        return search(
            *asked,
            ledgers.without_reasons,
            result.objective,
            result.profile.name,
            choices=choices,
            before=result,
        )
    except UserError:
        return None


def _closed(
    result: Result, flags: FormatFlags, model: str
) -> Iterator[tuple[str, str, str, Choices]]:
    """What, flag, proof, and choices that have it alone."""
    if result.profile.name != SELF:
        return  # other engines keep what they keep, and no record of this one speaks of them
    shape, choices = result.shape, result.choices
    if flags.kv_cache_dtype is None and flags.index_cache_dtype is None:
        for caches in smaller_caches(shape, choices):
            proof = cache_proof_command(result, caches, model)
            yield (
                _caches_words(shape, caches),
                _caches_flags(caches),
                proof,
                replace(choices, caches=(caches,)),
            )
    if flags.wire_dtype is None and result.best.layouts.prefill.group > 1:
        yield (
            "sums between ranks in fp8 or int8",
            "--wire-dtype fp8",
            wire_proof_command(result, model),
            replace(choices, wires=("fp8",)),
        )
    counts = draft_counts(shape)
    if flags.num_speculative_tokens is None and counts and choices.drafts == (0,):
        yield (
            f"drafting, if {ACCEPTED:.0%} of tokens hold",
            f"--num-speculative-tokens {counts[min(1, len(counts) - 1)]}",
            "no proof is needed, but this version does not draft; vLLM and SGLang do",
            replace(choices, drafts=counts),
        )


def _caches_words(shape: ModelShape, caches: Caches) -> str:
    return caches_text(shape, caches.into(Formats()))


def _caches_flags(caches: Caches) -> str:
    keys = "" if caches.index_keys == RELEASED else f" --index-cache-dtype {caches.index_keys}"
    return f"--kv-cache-dtype {caches.latents}{keys}"


def cache_proof_command(result: Result, caches: Caches, model: str) -> str:
    """The command that judges these formats, or why there is none."""
    arch = result.shape.arch
    if arch is None:
        return f"no command proves it yet: {result.shape.name} is not served by this version"
    plain = result.choices.caches[0]
    held = plain.latents if plain.latents in PLAIN else "bfloat16"
    ratios = [one.ratio for one in arch.layers if one.kind is LayerKind.COMPRESSED_SPARSE]
    # Windows in which not all entries are chosen, so that keys decide something.
    window = max(_LEAST_WINDOW, 2 * arch.index_topk * max(ratios, default=0))
    command = (
        f"{_QUALITY} {model} --window-len {window}"
        f" --a tuned,--kv-cache-dtype={held}"
        f" --b tuned,--kv-cache-dtype={caches.latents},--index-cache-dtype={caches.index_keys}"
    )
    return command


def wire_proof_command(result: Result, model: str) -> str:
    """The command that judges sums in fp8 over the ranks of the best layout, or why there is
    none."""
    if result.shape.arch is None:
        return f"no command proves it yet: {result.shape.name} is not served by this version"
    ranks = " ".join(words_of(axes_of(result.best.layouts)))
    return f"{_QUALITY} {model} {ranks} --a tuned,--wire-dtype=plain --b tuned,--wire-dtype=fp8"


def where_to_prove(result: Result) -> str:
    """Where such a command can run, if no GPU holds the model whole; "" else."""
    whole = sum(part.bytes for part in weight_parts(result.shape, Formats()))
    gpus = result.machine.gpus
    largest = 0 if isinstance(gpus, Unknown) else max(gpu.memory_bytes for gpu in gpus)
    if result.shape.arch is None or whole < largest:
        return ""
    return f"`bench quality` runs where one device, such as a CPU, holds {format_bytes(whole)}"


def gain_text(result: Result, longest: int, gain: Gain) -> str:
    """What it gives: rates where they differ, and the longest context."""
    if gain.result is None:
        return "fits in no layout"
    mine, other = result.best.prediction, gain.result.best.prediction
    parts = []
    for label, before, after, form, unit in (
        ("input", mine.input_per_s, other.input_per_s, ",.0f", "tok/s"),
        ("TTFT", mine.ttft_s * 1e3, other.ttft_s * 1e3, ",.0f", "ms"),
        ("TPOT", mine.tpot_s * 1e3, other.tpot_s * 1e3, ".1f", "ms"),
    ):
        if before != after and (math.isinf(after) or abs(after / before - 1) >= _TOLD):
            now, then = (
                OVERLOAD if math.isinf(value) else f"{value:{form}}{told}"
                for value, told in ((after, f" {unit}"), (before, ""))
            )
            parts.append(f"{label} {now} instead of {then}")
    more = other.requests_per_s / mine.requests_per_s - 1
    if parts or abs(more) >= 0.001:
        parts.insert(0, f"{more:+.1%} requests/s")
    if gain.longest_context != longest:
        parts.append(f"contexts to {gain.longest_context:,} instead of {longest:,}")
    if gain.result.best.layouts != result.best.layouts:
        parts.append(f"as {gain.result.best.layouts.name}")
    return ", ".join(parts) or "nothing for this workload"
