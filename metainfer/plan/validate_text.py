"""What validation found, as text of at most 100 columns, as a page and as a record."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from metainfer.plan.published import CONTEXT, FIRST, INPUT, OUTPUT
from metainfer.plan.validate import NEAR, Ordered, Row, Summary, Validation, summary_of

_WIDTH = 100
_SHORT = {INPUT: "in tok/s", OUTPUT: "out tok/s", FIRST: "TTFT s", CONTEXT: "context"}

_MEANS = (
    "*error*: with the constants that ship, which all figures set together. *apart*: with constants"
    " set without any figure of the row's machine, which is what a machine that nobody measured"
    " gets. Settings that sources leave open are assumed, row by row, below. All rows count, also"
    " those whose settings had to be assumed. `own-`: of this engine on one card; its rows follow"
    " from times of single operations there, and set no constant."
)

_NOT_BLIND = (
    "Only the constants below are set apart: nothing else here is blind. The others come from times"
    " of single operations and from traces, some of them of the same sites. What the model counts,"
    " what engines are taken to do, where constants start and what sources leave open was decided"
    " with all figures in sight. That holds most for the system to beat (`beat-`): it publishes no"
    " layouts, lengths or loads, several layouts were tried, and those assumed are among the ones"
    " that come near; two of its rows are taken for steps that others published and so count"
    " double. Read its rows as what could explain the figures. Errors of a machine and engine that"
    " is in no row may be larger than those *apart*."
)


def text(found: Validation, explain: bool) -> str:
    """The tables; with `explain` sources and assumptions of each row, and what is not predicted."""
    lines = [
        *_rows(found),
        "",
        *_sums(found),
        "",
        *_at_starts(found),
        "",
        *_orders(found),
        "",
        *_constants(found),
    ]
    lines += ["", *textwrap.wrap(_NOT_BLIND, _WIDTH)]
    if explain:
        lines += ["", *_off(found, "  "), "", *_settings(found, "  "), "", *_listed(found, "  ")]
    return "\n".join(lines)


def page_lines(found: Validation) -> list[str]:
    """A page in Markdown: its title, then the rest."""
    lines = ["Predictions of `metainfer plan` beside published figures", ""]
    lines += textwrap.wrap(
        "`metainfer plan validate` prints these tables. " + _MEANS, 120, break_on_hyphens=False
    )
    lines += ["", *textwrap.wrap(_NOT_BLIND, 120, break_on_hyphens=False)]
    lines += ["", "## Rows that are off by more than 30 %", "", *_off(found, "- ")]
    for title, part in (
        ("Rows", _rows(found)),
        ("In sum", [*_sums(found), "", *_at_starts(found)]),
        ("Orders that must come out right", _orders(found)),
        ("Constants that published figures set", _constants(found)),
    ):
        lines += ["", f"## {title}", "", "```", *part, "```"]
    lines += ["", "## Settings, sources, and what had to be assumed", "", *_settings(found, "- ")]
    return [*lines, "", "## Figures that are not predicted", "", *_listed(found, "- ")]


def record(found: Validation) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "rows": [
            {
                **asdict(row.published),
                "predicted": row.predicted,
                "error": row.error,
                "apart": row.apart,
                "error_apart": row.error_apart,
                "at_starts": row.at_starts,
            }
            for row in found.rows
        ],
        "orders": [
            {
                **asdict(one.order),
                "ratio": one.ratio,
                "ratios_apart": list(one.ratios_apart),
                "right": one.right,
                "right_apart": one.right_apart,
            }
            for one in found.orders
        ],
        "constants": [
            dict(zip(("name", "value", "least_apart", "most_apart"), one, strict=True))
            for one in found.constants
        ],
        "listed": [asdict(one) for one in found.figures.listed],
        "sums": [
            {"of": name, "error": asdict(all_), "error_apart": asdict(apart)}
            for name, all_, apart in sums(found.rows)
        ],
    }


def sums(rows: Sequence[Row]) -> list[tuple[str, Summary, Summary]]:
    """(of what, with all figures, without the machine's own)."""
    kinds: list[tuple[str, list[Row]]] = [("all rows", list(rows))]
    others = [r for r in rows if not r.published.own]
    kinds.append(("without our own", others))
    kinds.append(("nor those to beat", [r for r in others if not r.published.beat]))
    for quantity, short in _SHORT.items():
        kinds.append((short, [r for r in rows if r.published.case.quantity == quantity]))
    for engine in dict.fromkeys(r.published.case.engine for r in rows):
        kinds.append((f"engine {engine}", [r for r in rows if r.published.case.engine == engine]))
    for name in dict.fromkeys(r.published.case.machine for r in rows):
        kinds.append((name, [r for r in rows if r.published.case.machine == name]))
    return [
        (name, summary_of(r.error for r in some), summary_of(r.error_apart for r in some))
        for name, some in kinds
        if some
    ]


def _rows(found: Validation) -> list[str]:
    lines = [
        f"{'figure':<31}{'machine':<16}{'engine':<10}{'of':<9}{'published':>10}{'predicted':>10}"
        f"{'error':>7}{'apart':>7}"
    ]
    for row in found.rows:
        case = row.published.case
        lines.append(
            f"{row.published.id:<31}{case.machine:<16}{case.engine:<10}{_SHORT[case.quantity]:<9}"
            f"{_number(row.published.published):>10}{_number(row.predicted):>10}"
            f"{row.error:>+z7.0%}{row.error_apart:>+z7.0%}"
        )
    return lines


def _sums(found: Validation) -> list[str]:
    lines = [
        f"{'absolute errors':<22}{'rows':>5}{'mean':>8}{'median':>8}{'within 30 %':>13}"
        f"{'mean apart':>13}{'median apart':>14}{'within 30 %':>13}"
    ]
    for name, all_, apart in sums(found.rows):
        lines.append(
            f"{name:<22}{all_.rows:>5}{all_.mean:>8.0%}{all_.median:>8.0%}{_near(all_):>13}"
            f"{apart.mean:>13.0%}{apart.median:>14.0%}{_near(apart):>13}"
        )
    return lines


def _at_starts(found: Validation) -> list[str]:
    """What the constants would do that no figure has moved."""
    one = summary_of(row.error_at_starts for row in found.rows)
    return textwrap.wrap(
        f"With every constant at its start, which no figure moved: mean {one.mean:.0%}, median"
        f" {one.median:.0%}, within 30 % {_near(one)}.",
        _WIDTH,
    )


def _near(one: Summary) -> str:
    return f"{one.near} ({one.near / one.rows:.0%})"


def _orders(found: Validation) -> list[str]:
    lines = [f"{'order':<59}{'published':>22}{'predicted':>10}{'right':>9}"]
    for one in found.orders:
        lines.append(
            f"{one.order.name:<59}{one.order.published:>22}{one.ratio:>10.2f}{_right(one):>9}"
        )
    return lines


def _right(one: Ordered) -> str:
    if one.right and one.right_apart:
        return "yes"
    return "not apart" if one.right else "no"


def _constants(found: Validation) -> list[str]:
    lines = [
        f"{'constant':<28}{'value':>10}{'start':>10}{'bounds':>20}{'set without a machine':>26}"
    ]
    for (name, value, least, most), one in zip(found.constants, found.calibrated, strict=True):
        bounds, apart = f"{one.low:g} to {one.high:g}", f"{least:.3g} to {most:.3g}"
        lines.append(f"{name:<28}{value:>10.4g}{one.start:>10.4g}{bounds:>20}{apart:>26}")
    return lines


def _settings(found: Validation, mark: str) -> list[str]:
    lines: list[str] = []
    for row in found.rows:
        case = row.published.case
        asked = f"{case.model} on {case.machine}, {case.layout.name}, {case.tokens:,} tokens"
        assumed = "; ".join(row.published.assumed)
        told = f"{row.published.id}: {asked}. {row.published.source}. Assumed: {assumed}."
        lines += _entry(mark, told)
    return lines


def _off(found: Validation, mark: str) -> list[str]:
    """Rows that are far from what was published, and what is known of why."""
    lines: list[str] = []
    for row in found.rows:
        if max(abs(row.error), abs(row.error_apart)) > NEAR:
            why = row.published.off or "why is not known"
            told = f"{row.published.id}: {row.error:+z.0%}, apart {row.error_apart:+z.0%}: {why}."
            lines += _entry(mark, told)
    return lines or [f"{mark}none"]


def _listed(found: Validation, mark: str) -> list[str]:
    lines: list[str] = []
    for one in found.figures.listed:
        lines += _entry(mark, f"{one.machine}, {one.model}: {one.value} ({one.source}): {one.why}.")
    return lines


def _entry(mark: str, told: str) -> Iterable[str]:
    return textwrap.wrap(
        told,
        _WIDTH,
        initial_indent=mark,
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
