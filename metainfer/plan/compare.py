"""Two machines side by side for one model and workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from metainfer.arch.shapes import ModelShape
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Machine
from metainfer.plan.found import Ledger
from metainfer.plan.search import Result, search
from metainfer.plan.search_text import wrapped
from metainfer.plan.workload import Workload

_MISSING = {
    "tokens_per_joule": "needs --power-w A,B: watts of each machine under load",
    "cost_per_million": "needs --price-per-hour A,B: of each machine, in one currency",
}


@dataclass(frozen=True, slots=True)
class Side:
    """One machine at its best layout.

    Attributes:
        name: as it was asked for.
        result: of the search.
        power_w, price_per_hour: of the whole machine; None where not given.
    """

    name: str
    result: Result
    power_w: float | None
    price_per_hour: float | None

    @property
    def tokens_per_s(self) -> float:
        """Of input and output, as the workload mixes them."""
        work, told = self.result.workload, self.result.best.prediction
        return told.requests_per_s * (work.input_tokens + work.output_tokens)

    @property
    def tokens_per_joule(self) -> float | None:
        return None if self.power_w is None else self.tokens_per_s / self.power_w

    @property
    def cost_per_million(self) -> float | None:
        """Of a million tokens of input and output, as the workload mixes them."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour / (self.tokens_per_s * 3600.0) * 1e6


@dataclass(frozen=True, slots=True)
class Comparison:
    first: Side
    second: Side

    def machines_of_first(self) -> dict[str, float]:
        """How many of the first machine do what one of the second does, by what is asked of
        them."""
        one, other = self.first.result.best.prediction, self.second.result.best.prediction
        return {
            "input_tokens_per_s": other.input_per_s / one.input_per_s,
            "output_tokens_per_s": other.output_per_s / one.output_per_s,
            "requests_per_s": other.requests_per_s / one.requests_per_s,
        }


def compare(
    shape: ModelShape,
    machines: tuple[tuple[str, Machine], tuple[str, Machine]],
    workload: Workload,
    ledger: Ledger,
    objective: str,
    profile: str,
    power_w: tuple[float, float] | None = None,
    price_per_hour: tuple[float, float] | None = None,
) -> Comparison:
    """Each machine at its best. Raises UserError, with the machine's name and a hint, where one has
    no layout."""
    sides = []
    for place, (name, machine) in enumerate(machines):
        try:
            result = search(shape, machine, workload, ledger, objective, profile)
        except UserError as error:
            asked = f"`metainfer plan {shape.name} --machine {name}` asks of it alone"
            hint = f"{error.hint}; {asked}" if error.hint else asked
            raise UserError(f"{name}: {error.message}", hint=hint) from error
        sides.append(
            Side(
                name,
                result,
                None if power_w is None else power_w[place],
                None if price_per_hour is None else price_per_hour[place],
            )
        )
    return Comparison(*sides)


def text(found: Comparison) -> str:
    """At most 100 columns."""
    sides = (found.first, found.second)
    best = [side.result.best for side in sides]
    told = [one.prediction for one in best]
    work = found.first.result.workload
    lines = [
        f"model      {found.first.result.shape.name}",
        f"workload   {work.input_tokens:,} tokens in, {work.output_tokens:,} out,"
        f" {work.requests_at_once} at once",
        f"engine     {found.first.result.profile.name}: {found.first.result.profile.meaning}"[:100],
        "",
        _line("", *(side.name for side in sides)),
        _line("layout", *(one.layouts.name for one in best)),
        _line("input tok/s", *(f"{p.input_per_s:,.0f} (+-{p.input_error:.0%})" for p in told)),
        _line("TTFT", *(p.ttft_told for p in told)),
        _line("TPOT", *(f"{p.tpot_s * 1e3:.1f} ms (+-{p.decode_error:.0%})" for p in told)),
        _line("output tok/s", *(f"{p.output_per_s:,.0f}" for p in told)),
        _line("requests/s", *(f"{p.requests_per_s:.3g}" for p in told)),
        *_with_givens(sides),
        "",
    ]
    named = {
        "input_tokens_per_s": "input",
        "output_tokens_per_s": "decoding",
        "requests_per_s": "this workload",
    }
    parts = [f"{count:.2f} for {named[what]}" for what, count in found.machines_of_first().items()]
    lines.append(f"Machines of {found.first.name} that do what one {found.second.name} does:")
    lines += [f"  {', '.join(parts)}", *_notes(sides)]
    return "\n".join(lines)


def _notes(sides: tuple[Side, Side]) -> list[str]:
    """What holds of both, then of one, by its name."""
    one, other = (side.result.notes for side in sides)
    told = [note for note in one if note in other]
    for side, beyond in zip(sides, (other, one), strict=True):
        told += [f"{side.name}: {note}" for note in side.result.notes if note not in beyond]
    return ["", *wrapped("note", told)[:-1]] if told else []


def _with_givens(sides: tuple[Side, Side]) -> Iterator[str]:
    for label, field in (
        ("tokens/joule", "tokens_per_joule"),
        ("cost per 1M", "cost_per_million"),
    ):
        values = [getattr(side, field) for side in sides]
        if None in values:
            yield f"{label:<14}{_MISSING[field]}"
        else:
            yield _line(label, *(f"{value:.3g}" for value in values))


def _line(label: str, first: str, second: str) -> str:
    return f"{label:<14}{first:<42}{second}".rstrip()


def record(found: Comparison) -> dict[str, Any]:
    """JSON-ready; what was not given is null."""
    return {
        "version": 1,
        "kind": "comparison",
        "model": found.first.result.shape.name,
        "engine": found.first.result.profile.name,
        "machines": [_side(side) for side in (found.first, found.second)],
        "machines_of_first_per_second": found.machines_of_first(),
    }


def _side(side: Side) -> dict[str, Any]:
    told = side.result.best.prediction
    return {
        "name": side.name,
        "layout": side.result.best.layouts.name,
        "input_tokens_per_s": told.input_per_s,
        "ttft_s": told.ttft_or_none,
        "tpot_s": told.tpot_s,
        "output_tokens_per_s": told.output_per_s,
        "requests_per_s": told.requests_per_s,
        "input_uncertainty": told.input_error,
        "decode_uncertainty": told.decode_error,
        "power_w": side.power_w,
        "price_per_hour": side.price_per_hour,
        "tokens_per_joule": side.tokens_per_joule,
        "cost_per_million_tokens": side.cost_per_million,
        "notes": list(side.result.notes),
    }
