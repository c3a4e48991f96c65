"""The picture of a record of `bench stages`: every turn of every setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from metainfer.bench.plot import (
    finish_below,
    in_style,
    look_of,
    points_of,
    rounded,
    time_axis,
    write_above,
)
from metainfer.bench.stages import DECODE, PREFILL, TRAFFIC

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_stages(made: Mapping[str, Any], picture_format: str = "svg") -> bytes:
    return in_style(lambda: _figure(made), picture_format)


def _figure(made: Mapping[str, Any]) -> Figure:
    """Input rates, steps of decode, first tokens under traffic, memory."""
    figure = Figure((10.0, 6.2), layout="constrained")
    axes = figure.subplots(2, 2).ravel().tolist()
    sides = list(made["sides"])
    works = made["works"]
    _rates(axes[0], [work for work in works if work["do"] == PREFILL], sides)
    _steps(axes[1], [work for work in works if work["do"] == DECODE], sides)
    _first_tokens(axes[2], [work for work in works if work["do"] == TRAFFIC], sides)
    _memory(axes[3], made["sides"])
    figure.suptitle(
        f"metainfer bench stages: {made['model']}, {made['arch']['layers']} layers\n"
        "points: turns; lines and bars: medians"
    )
    handles = [Line2D([], [], **look_of(n), label=name) for n, name in enumerate(sides)]
    finish_below(figure, [origin_of(made)], handles)
    return figure


def origin_of(made: Mapping[str, Any]) -> str:
    """Machine and commit for the small print."""
    machine = made["machine"]
    gpus = machine["gpus"] if isinstance(machine["gpus"], list) else []
    names = [gpu["name"] for gpu in gpus] or [str(machine["cpu"]["model"])]
    return f"{', '.join(dict.fromkeys(names))}; commit {str(made['commit'])[:12]}; {made['date']}"


def _rates(axes: Axes, works: Sequence[Mapping[str, Any]], sides: Sequence[str]) -> None:
    shown: list[float] = []
    for n, name in enumerate(sides):
        measured = [work for work in works if name in work["sides"]]
        lengths = [work["prompt_tokens"] for work in measured]
        middles = [work["sides"][name]["tokens_per_s"] for work in measured]
        look = {**look_of(n), "marker": ""}
        axes.plot(lengths, middles, **look, lw=1.2, gid=f"input-{n}")
        for work in measured:
            side = work["sides"][name]
            rates = [t / s for t, s in zip(side["tokens"], side["seconds"], strict=True)]
            axes.plot([work["prompt_tokens"]] * len(rates), rates, **points_of(n))
            shown += rates
    axes.set_xscale("log")
    _log_upwards(axes, shown)
    axes.set_xticks([work["prompt_tokens"] for work in works])
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens of the prompt, log scale")
    axes.set_ylabel("input tokens/s, log scale")
    axes.set_title("One cold prompt at a time")


def _log_upwards(axes: Axes, shown: Sequence[float]) -> None:
    """A log scale for what is shown; where that is nothing, no time was measured."""
    if not any(value > 0 for value in shown):
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _steps(axes: Axes, works: Sequence[Mapping[str, Any]], sides: Sequence[str]) -> None:
    width = 0.8 / max(len(sides), 1)
    shown: list[float] = []
    for place, work in enumerate(works):
        for n, name in enumerate(sides):
            side = work["sides"].get(name)
            if side is None:
                continue
            times = [
                1e3 * s * work["batch"] / t
                for s, t in zip(side["seconds"], side["tokens"], strict=True)
            ]
            x = place + (n - (len(sides) - 1) / 2) * width
            axes.plot([x] * len(times), times, **points_of(n), gid=f"tpot-{place}-{n}")
            middle = statistics.median(times)
            axes.plot([x - 0.4 * width, x + 0.4 * width], [middle] * 2, "-k", lw=1.4)
            write_above(axes, x, max(times), rounded(middle))
            shown += times
    axes.set_xticks(range(len(works)), [f"batch {work['batch']}" for work in works])
    _log_upwards(axes, shown)
    if above := [value for value in shown if value > 0]:
        axes.set_ylim(min(above) / 1.5, max(above) * 2)
    axes.set_ylabel("milliseconds, log scale")
    axes.set_title("Time per output token (TPOT)")


def _first_tokens(axes: Axes, works: Sequence[Mapping[str, Any]], sides: Sequence[str]) -> None:
    shown: list[float] = []
    for work in works:
        for n, name in enumerate(sides):
            if name not in work["sides"]:
                continue
            times = sorted(1e3 * t for t in work["sides"][name]["ttft_s"])
            shares = [100 * k / len(times) for k in range(len(times) + 1)]
            look = {**look_of(n), "marker": ""}
            axes.plot([times[0], *times], shares, drawstyle="steps-post", **look, gid=f"ttft-{n}")
            shown += times
    if not shown:
        axes.text(0.5, 0.5, "no traffic", ha="center", transform=axes.transAxes)
    axes.set_ylim(0, 103)
    axes.set_ylabel("requests, %")
    axes.set_title("Time to first token (TTFT) under traffic")
    time_axis(axes, "milliseconds at most", shown)


def _memory(axes: Axes, sides: Mapping[str, Any]) -> None:
    most = 0.0
    for n, side in enumerate(sides.values()):
        for name, hollow in (("device_peak_bytes", False), ("peak_bytes", True)):
            value = side["peaks"].get(name)
            if value is not None:
                axes.plot([n], [value / 1e9], **points_of(n, hollow=hollow), gid=f"{name}-{n}")
                write_above(axes, n, value / 1e9, rounded(value / 1e9))
                most = max(most, value / 1e9)
    axes.set_xticks(range(len(sides)), list(sides))
    axes.set_xlim(-0.6, len(sides) - 0.4)
    axes.set_ylim(0, 1.2 * most or 1.0)
    axes.set_ylabel("GB")
    axes.set_title("Peak memory (filled: GPU, hollow: host)")
