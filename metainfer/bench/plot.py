"""Pictures of benchmark records: every round, every request. All of matplotlib is used here.

Nothing depends on the user's matplotlib settings, the clock or a display: the same records give
the same bytes. What is told by colour is told by marker and line style too.
"""

from __future__ import annotations

import io
import math
import statistics
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from metainfer.bench.plot_records import ModelRecord, Ratio, ServeRecord, ServeRun, Side
from metainfer.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":", (0, (8, 2, 1, 2, 1, 2)))
_STYLE: Mapping[Any, Any] = MappingProxyType(
    {
        "font.size": 8.5,
        "axes.titlesize": 9.5,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.alpha": 0.3,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "metainfer",  # ids do not depend on chance
        "text.parse_math": False,  # a label may hold a dollar sign
    }
)
_METRICS = MappingProxyType(
    {
        "ttft": ("Time to first token (TTFT)", "requests, %"),
        "tpot": ("Time per output token (TPOT)", "requests, %"),
        "itl": ("Gap between pieces (ITL)", "gaps, %"),
        "e2el": ("Whole request (end to end)", "requests, %"),
    }
)
_MARKED = (50, 99)  # per cent
_DOTS_PER_INCH = 150
_MOST_PANELS = 64
_MOST_COLUMNS = 4
_LOG_FROM = 30.0  # a scale by powers of ten once the slowest takes so many times the fastest
_LEGEND_INCH = 0.2  # of one line
_FOOTER_INCH, _FOOTER_CHARACTERS_PER_INCH = 0.13, 18


def draw(records: Sequence[ModelRecord] | Sequence[ServeRecord], picture_format: str) -> bytes:
    """The picture's file, as "svg" or "png". Records are of one kind."""
    models = [record for record in records if isinstance(record, ModelRecord)]
    serves = [record for record in records if isinstance(record, ServeRecord)]
    return in_style(
        lambda: _model_figure(models) if models else _serve_figure(serves), picture_format
    )


def in_style(make: Callable[[], Figure], picture_format: str) -> bytes:
    """The file of a figure that is made in the style of all these pictures."""
    file = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Letters that the font lacks: an SVG has them as text, a PNG shows boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = make()
        metadata = {"Date": None} if picture_format == "svg" else None
        figure.savefig(
            file, format=picture_format, dpi=_DOTS_PER_INCH, metadata=metadata, facecolor="white"
        )
    return file.getvalue()


def _model_figure(records: Sequence[ModelRecord]) -> Figure:
    """A panel for each piece of work and one for memory; each record begins a row."""
    widest = max(len(record.ratios) + 1 for record in records)
    columns = min(_MOST_COLUMNS, widest)
    rows_each = [-(-(len(record.ratios) + 1) // columns) for record in records]
    if sum(rows_each) * columns > _MOST_PANELS:
        raise UserError(
            f"{sum(rows_each) * columns} panels do not fit one picture of {_MOST_PANELS}",
            hint="draw fewer records at once",
        )
    figure = Figure((3.3 * columns, 3.0 * sum(rows_each) + 0.8), layout="constrained")
    grid = figure.subplots(sum(rows_each), columns, squeeze=False)
    row = 0
    for number, (record, rows) in enumerate(zip(records, rows_each, strict=True)):
        free: list[Axes] = grid[row : row + rows].ravel().tolist()
        row += rows
        head = f"{record.name}\n" if len(records) > 1 else ""
        for n, ratio in enumerate(record.ratios):
            _rounds_panel(free.pop(0), record.sides, ratio, head, f"{number}-{n}")
        _memory_panel(free.pop(0), record.sides, head, f"{number}-memory")
        for axes in free:
            axes.remove()
    names = ", ".join(dict.fromkeys(record.model for record in records))
    figure.suptitle(f"metainfer bench model: {names}\npoints: rounds in order; bars: medians")
    finish_below(figure, [record.origin for record in records])
    return figure


def _rounds_panel(axes: Axes, sides: Sequence[Side], ratio: Ratio, head: str, place: str) -> None:
    """Every round of each side, from left to right in order, and the median as a bar."""
    for n, side in enumerate(sides):
        rates = side.rates[ratio.work]
        spread = 0.5 / max(len(rates) - 1, 1)
        xs = [n + spread * (k - (len(rates) - 1) / 2) for k in range(len(rates))]
        median = statistics.median(rates)
        axes.plot(xs, rates, **points_of(n), gid=f"rounds-{place}-{n}")
        axes.plot([n - 0.36, n + 0.36], [median] * 2, "-k", lw=1.4, gid=f"median-{place}-{n}")
        write_above(axes, n, max(rates), f"median {rounded(median)}")
    axes.set_title(
        f"{head}{ratio.work}\n{ratio.middle:.2f} times {ratio.peer}\n"
        f"({ratio.low:.2f} to {ratio.high:.2f} over the rounds)"
    )
    axes.set_ylabel("tokens/s")
    most = max(max(side.rates[ratio.work]) for side in sides)
    _finish_sides(axes, sides, most)


def _memory_panel(axes: Axes, sides: Sequence[Side], head: str, place: str) -> None:
    """The most that each side held, and what its libraries alone took."""
    for n, side in enumerate(sides):
        peak, libraries = side.peak_bytes / 1e6, side.libraries_bytes / 1e6
        axes.plot([n, n], [libraries, peak], ":k", lw=1.0)
        axes.plot([n], [peak], **points_of(n), gid=f"peak-{place}-{n}")
        axes.plot([n], [libraries], **points_of(n, hollow=True), gid=f"libraries-{place}-{n}")
        write_above(axes, n, peak, rounded(peak))
    title = f"{head}peak memory"
    if peers := sides[1:]:
        least = min(peers, key=lambda side: side.peak_bytes)
        title += f"\n{sides[0].peak_bytes / max(least.peak_bytes, 1):.2f} times {least.title}"
    axes.set_title(f"{title}\n(hollow: libraries alone)")
    axes.set_ylabel("MB")
    _finish_sides(axes, sides, max(side.peak_bytes for side in sides) / 1e6)


def _finish_sides(axes: Axes, sides: Sequence[Side], most: float) -> None:
    axes.set_xticks(range(len(sides)), [side.title.replace(" ", "\n") for side in sides])
    axes.set_xlim(-0.6, len(sides) - 0.4)
    axes.set_ylim(0, 1.15 * most or 1.0)
    axes.grid(visible=False, axis="x")


def _serve_figure(records: Sequence[ServeRecord]) -> Figure:
    """Distributions where requests are recorded; with several records, throughput too."""
    drawn = [n for n, record in enumerate(records) if record.detailed]
    rows = (2 if drawn else 0) + (1 if len(records) > 1 else 0)
    figure = Figure((10.0, 2.9 * rows + 0.4), layout="constrained")
    grid: list[Axes] = figure.subplots(rows, 2, squeeze=False).ravel().tolist()
    if drawn:
        for metric in _METRICS:
            _distribution_panel(grid.pop(0), metric, {n: records[n] for n in drawn})
    if len(records) > 1:
        for name, axes in zip(("p50", "p99"), grid, strict=True):
            _throughput_panel(axes, name, records)
    figure.suptitle(
        "metainfer bench serve" + (": every run, marks at 50 % and 99 %" if drawn else "")
    )
    handles = [_legend_line(n, record) for n, record in enumerate(records)]
    finish_below(figure, [record.origin for record in records], handles)
    return figure


def _distribution_panel(axes: Axes, metric: str, records: Mapping[int, ServeRecord]) -> None:
    """Which share took how long at most: a line for every run."""
    title, unit = _METRICS[metric]
    shown: list[float] = []
    for number, record in records.items():
        for k, run in enumerate(record.runs):
            values = sorted(run.samples_ms[metric]) if run.samples_ms else []
            if not values:
                continue
            shown += (values[0], values[-1])
            shares = [100 * n / len(values) for n in range(len(values) + 1)]
            look = look_of(number)
            axes.plot(
                [values[0], *values], shares, drawstyle="steps-post", lw=1.3,
                color=look["color"], linestyle=look["linestyle"],
                gid=f"share-{metric}-{number}-{k}",
            )  # fmt: skip
            # Of the nearest rank, not between ranks: the marks lie on the steps.
            marks = [values[math.ceil(len(values) * share / 100) - 1] for share in _MARKED]
            axes.plot(marks, _MARKED, **points_of(number), gid=f"marks-{metric}-{number}-{k}")
    if not shown:
        axes.text(0.5, 0.5, "no values", ha="center", transform=axes.transAxes)
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_ylim(0, 103)
    time_axis(axes, "milliseconds at most", shown)


def _throughput_panel(axes: Axes, name: str, records: Sequence[ServeRecord]) -> None:
    """Throughput against one percentile of the time to the first token, in order of load."""
    series: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        series.setdefault(record.series, []).append(number)
    shown: list[float] = []
    for s, numbers in enumerate(series.values()):
        numbers.sort(key=lambda number: records[number].load_order)
        middles = [records[number].median_run for number in numbers]
        axes.plot(
            [run.ttft_ms[name] for run in middles], [run.throughput for run in middles],
            color="0.6", linestyle=_LINES[s % len(_LINES)], lw=1.0, gid=f"series-{name}-{s}",
        )  # fmt: skip
        for number, middle in zip(numbers, middles, strict=True):
            runs = list(_with_ttft(records[number], name))
            shown += [run.ttft_ms[name] for run in runs]
            axes.plot(
                [run.ttft_ms[name] for run in runs], [run.throughput for run in runs],
                **points_of(number, hollow=True), gid=f"runs-{name}-{number}",
            )  # fmt: skip
            at = (middle.ttft_ms[name], middle.throughput)
            axes.plot(*([v] for v in at), **points_of(number), gid=f"middle-{name}-{number}")
            axes.annotate(
                records[number].load, at, (0, 7), textcoords="offset points", ha="center",
                fontsize=7,
            )  # fmt: skip
    axes.set_title(f"Throughput against {name} of TTFT (filled: median run)")
    axes.set_ylabel("tokens/s, prompts and answers")
    most = max(run.throughput for record in records for run in record.runs)
    axes.set_ylim(0, 1.2 * most or 1.0)
    axes.margins(x=0.15)
    time_axis(axes, f"{name} of the time to first token, ms", shown)


def _with_ttft(record: ServeRecord, name: str) -> Iterator[ServeRun]:
    return (run for run in record.runs if name in run.ttft_ms)


def _legend_line(number: int, record: ServeRecord) -> Artist:
    from matplotlib.lines import Line2D

    label = f"{record.name}: {sum(run.completed for run in record.runs)} requests"
    if len(record.runs) > 1:
        label += f" in {len(record.runs)} runs"
    if failed := sum(run.failed for run in record.runs):
        label += f", {failed} failed and not drawn"
    # matplotlib leaves out labels that begin with an underscore.
    label = f" {label}" if label.startswith("_") else label
    return Line2D([], [], **look_of(number), label=label)


def time_axis(axes: Axes, label: str, shown: Sequence[float]) -> None:
    """By powers of ten where times lie far apart, from 0 otherwise."""
    if shown and min(shown) > 0 and max(shown) > _LOG_FROM * min(shown):
        axes.set_xscale("log")
        decades = math.log10(max(shown) / min(shown))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{label}, log scale")
    else:
        axes.set_xlim(left=0, right=None if shown and max(shown) > 0 else 1.0)
        axes.set_xlabel(label)


def finish_below(figure: Figure, origins: Sequence[str], handles: Sequence[Artist] = ()) -> None:
    """The legend, and in small print model, machine and commit, in a band below the panels."""
    width, height = figure.get_size_inches()
    most = int(width * _FOOTER_CHARACTERS_PER_INCH)
    lines = [line for origin in dict.fromkeys(origins) for line in textwrap.wrap(origin, most)]
    footer = _FOOTER_INCH * len(lines) + 0.12
    band = footer + _LEGEND_INCH * len(handles)
    whole = height + band
    figure.set_size_inches(width, whole)
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, band / whole, 1, 1 - band / whole))
    if handles:
        place = (0.5, footer / whole)
        figure.legend(handles=handles, loc="lower center", bbox_to_anchor=place, frameon=False)
    figure.text(0.01, 0.06 / whole, "\n".join(lines), fontsize=6.5, color="0.35", gid="footer")


def look_of(n: int) -> dict[str, Any]:
    """Colour, marker and line style of the n-th of several."""
    return {
        "color": _COLOURS[n % len(_COLOURS)],
        "marker": _MARKERS[n % len(_MARKERS)],
        "linestyle": _LINES[n % len(_LINES)],
    }


def points_of(n: int, hollow: bool = False) -> dict[str, Any]:
    """Markers alone, of the n-th of several."""
    look = look_of(n) | {"linestyle": "none", "ms": 5.5, "alpha": 0.8}
    return look | ({"markerfacecolor": "none"} if hollow else {})


def write_above(axes: Axes, x: float, y: float, text: str) -> None:
    """A small text above a point."""
    axes.annotate(text, (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=8)


def rounded(value: float) -> str:
    """Three figures or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
