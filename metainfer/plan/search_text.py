"""What a search found, as text of at most 100 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from metainfer.core.units import format_bytes, format_seconds
from metainfer.hardware.machine import gpus_of
from metainfer.plan.choices import caches_text
from metainfer.plan.command_text import command_lines
from metainfer.plan.cost.phases import Step
from metainfer.plan.cost.predict import OVERLOAD, Prediction
from metainfer.plan.found import Candidate
from metainfer.plan.gains import Outlook, gain_text, where_to_prove
from metainfer.plan.layouts import RELEASED
from metainfer.plan.rank_lines import RankLedger, ledger_text
from metainfer.plan.search import Result
from metainfer.plan.speculation import tokens_a_step, tokens_text

WIDTH = 100
_SHOWN = 5
_BAR = 30
_LEGEND = (
    "Layouts: N x is replicas; of one, TP divides heads and matrices, CP tokens of prompts, PP"
    " layers, EP experts and KV caches of contexts over so many GPUs; behind the bar, what decode"
    " does otherwise."
)
_PLACES = {"host": "in host memory", "gpu": "on GPUs", "disk": "on disk"}


def summary(result: Result, ahead: Outlook | None = None) -> str:
    """The best layout in a screen, and what was not chosen for want of proof."""
    best = result.best
    lines = [*_asked(result), "", *_choice(result, ahead), ""]
    lines += [*_rates(result, best), ""]
    lines += wrapped("note", result.notes)
    lines += _not_chosen(result, ahead)
    lines.append("--explain shows where the time goes, the next layouts and why others lose.")
    return "\n".join(lines)


def explained(result: Result, ahead: Outlook | None = None) -> str:
    """The best layout, where its time goes, the next ones, and why others lose."""
    best = result.best
    lines = [*_asked(result), "", *_choice(result, ahead), "", *_rates(result, best), ""]
    lines += wrapped("note", result.notes)
    lines += _not_chosen(result, ahead)
    lines += _table_of_time(
        "a token of a prompt (on one replica)", best.prediction.prefill, 1e6, "us"
    )
    lines += _table_of_time(_step(best), best.prediction.decode, 1e3, "ms")
    lines += _rests_on(best)
    lines += _memory(best)
    lines += _layouts(result.ranked)
    lines += _losers(result)
    return "\n".join(lines).rstrip()


def _step(best: Candidate) -> str:
    drafted = best.formats.draft
    if not drafted:
        return "a decode step"
    return f"a decode step of {tokens_a_step(drafted):.1f} tokens, drafting included,"


def _asked(result: Result) -> list[str]:
    work, machine = result.workload, result.machine
    gpus = gpus_of(machine)
    arrives = (
        f"{work.requests_at_once} at once"
        if work.request_rate_per_s is None
        else f"{work.request_rate_per_s:g} a second, {work.requests_at_once} at once"
    )
    return [
        f"model      {result.shape.name}",
        f"machine    {len(gpus)} x {gpus[0].name}",
        f"workload   {work.input_tokens:,} tokens in, {work.output_tokens:,} out, {arrives};"
        f" contexts to {work.longest_context:,}",
        f"objective  {result.objective}; engine {result.profile.name}",
    ]


def _choice(result: Result, ahead: Outlook | None) -> list[str]:
    best = result.best
    formats = best.formats
    placed = "experts as released" if formats.experts == RELEASED else f"experts {formats.experts}"
    if result.shape.engram is not None:
        placed += f", n-gram tables {_PLACES[formats.engram]}"
    room = "" if ahead is None else f"; contexts to {ahead.longest_context:,} tokens would fit"
    return [
        f"prefill    {best.layouts.prefill.name}, chunks of {formats.chunk_rows:,} rows",
        f"decode     {best.layouts.decode.name}",
        f"formats    {placed}, {caches_text(result.shape, formats)}",
        *([f"wire       {_wire(result)}"] if best.layouts.prefill.group > 1 else []),
        f"memory     {format_bytes(best.ledger.total_bytes)} of"
        f" {format_bytes(best.ledger.limit_bytes)} on the fullest GPU{room}",
        *([f"drafting   {tokens_text(formats.draft)} before each step"] if formats.draft else []),
    ]


def _not_chosen(result: Result, ahead: Outlook | None) -> list[str]:
    """Choices that need a proof, or more than this version."""
    if ahead is None or not ahead.gains:
        return []
    lines = ["Not chosen; what each would give, what must come first, the flag that takes it now:"]
    for gain in ahead.gains:
        lines += _entry(gain.what, gain_text(result, ahead.longest_context, gain))
        if gain.command:
            lines += command_lines(gain.proof, WIDTH, " " * 6)
        else:
            lines += textwrap.wrap(gain.proof, WIDTH, initial_indent=" " * 6)
        lines.append(f"      {gain.flag}")
    where = where_to_prove(result) if any(gain.command for gain in ahead.gains) else ""
    return [*lines, *([f"  {where}"] if where else []), ""]


def _wire(result: Result) -> str:
    """How activations of prompts go between ranks."""
    formats, layout = result.best.formats, result.best.layouts.prefill
    if layout.context > 1 and result.phases.gathers_codes:
        return f"rows gathered in e4m3, as experts read them (exact); sums in {formats.wire}"
    return f"sums in {formats.wire}"


def _memory(best: Candidate) -> list[str]:
    """The ledger of the fullest GPU, line by line."""
    if not isinstance(best.ledger, RankLedger):
        return []
    return ["Memory of the fullest GPU:", *ledger_text(best.ledger), ""]


def _rates(result: Result, best: Candidate) -> list[str]:
    told = best.prediction
    lines = [
        f"input      {told.input_per_s:,.0f} tok/s (+-{told.input_error:.0%})",
        f"TTFT       {_ttft(told)}",
        f"TPOT       {told.tpot_s * 1e3:.1f} ms (+-{told.decode_error:.0%}), that is"
        f" {1 / told.tpot_s:,.0f} tok/s a sequence and {told.output_per_s:,.0f} in all",
        f"requests   {told.requests_per_s:.3g} a second, prompts and decoding in turns",
    ]
    if told.load is not None:
        lines.append(f"load       {told.load:.0%} of what these replicas answer")
    return lines


def _ttft(told: Prediction) -> str:
    if math.isinf(told.ttft_s):
        return (
            f"{OVERLOAD}: more requests arrive than are answered;"
            f" {format_seconds(told.idle_ttft_s)} (+-{told.input_error:.0%}) for one alone"
        )
    return f"{told.ttft_told} (+-{told.input_error:.0%})"


def _table_of_time(title: str, step: Step, scale: float, unit: str) -> list[str]:
    groups = sorted(step.by_group().items(), key=lambda pair: -pair[1])
    whole = step.seconds or 1.0
    lines = [f"Where {title} goes: {whole * scale:.2f} {unit}"]
    for group, seconds in groups:
        share = seconds / whole
        bar = "#" * round(share * _BAR)
        lines.append(f"  {group:<20}{seconds * scale:>9.2f} {unit}{share:>6.0%}  {bar}".rstrip())
    return [*lines, ""]


def _rests_on(best: Candidate) -> list[str]:
    """The inputs that most time rests on."""
    weights: dict[tuple[str, str, str], float] = {}
    step = best.prediction.prefill
    for item in step.items:
        key = (item.group, item.origin, item.why)
        weights[key] = weights.get(key, 0.0) + item.seconds / (step.seconds or 1.0)
    lines = ["What the input rate rests on:"]
    for (group, origin, why), share in sorted(weights.items(), key=lambda pair: -pair[1])[:6]:
        text = f"{share:>4.0%}  {group}, {origin}: {why}"
        lines += textwrap.wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent=" " * 8)
    return [*lines, ""]


def _layouts(ranked: Sequence[Candidate]) -> list[str]:
    drafts = any(one.formats.draft for one in ranked[:_SHOWN])
    lines = [
        f"{'layout (prefill | decode)':<32}{'chunk':>7}{'input tok/s':>13}{'TTFT':>10}"
        f"{'TPOT ms':>9}{'req/s':>8}{'memory':>11}{'drafts' if drafts else '':>8}".rstrip()
    ]
    for one in ranked[:_SHOWN]:
        told = one.prediction
        lines.append(
            f"{one.layouts.name:<32}{one.formats.chunk_rows:>7}{told.input_per_s:>13,.0f}"
            f"{told.ttft_told:>10}{told.tpot_s * 1e3:>9.1f}"
            f"{told.requests_per_s:>8.3g}{format_bytes(one.ledger.total_bytes):>11}"
            + (f"{one.formats.draft:>8}" if drafts else "")
        )
    return [*lines, "", *textwrap.wrap(_LEGEND, WIDTH), ""]


def _losers(result: Result) -> list[str]:
    lines = []
    others = result.ranked[1:]
    if others:
        lines.append("Why not the others:")
    for one in others[: 2 * _SHOWN]:
        lines += _entry(one.layouts.name, one.why)
    if len(others) > 2 * _SHOWN:
        lines.append(f"  and {len(others) - 2 * _SHOWN} more, each slower than those above")
    if result.rejected:
        lines += ["", f"Refused ({len(result.rejected)}):"]
    by_reason: dict[str, list[str]] = {}
    for rejection in result.rejected:
        by_reason.setdefault(rejection.reason, []).append(rejection.name)
    for reason, names in list(by_reason.items())[: 2 * _SHOWN]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines += _entry(names[0] + more, reason)
    if len(by_reason) > 2 * _SHOWN:
        lines.append(f"  and {len(by_reason) - 2 * _SHOWN} more; --json lists all")
    return lines


def _entry(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{name}: {text}", WIDTH - 2, initial_indent="  ", subsequent_indent=" " * 6
    )


def wrapped(label: str, sentences: Sequence[str]) -> list[str]:
    """Each sentence behind the label, and an empty line."""
    lines = []
    for sentence in sentences:
        lines += textwrap.wrap(
            sentence, WIDTH, initial_indent=f"{label:<11}", subsequent_indent=" " * 11
        )
    return [*lines, ""] if lines else []
