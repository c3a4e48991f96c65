"""The picture of a profile: a bar for each operation, and how much of it its floor is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from metainfer.bench.plot import finish_below, in_style, look_of
from metainfer.bench.plot_stages import origin_of
from metainfer.bench.profile_report import label_of, title_of

_MOST_BARS = 18
_INCH_PER_BAR = 0.24


def draw_profile(made: Mapping[str, Any], picture_format: str = "svg") -> bytes:
    return in_style(lambda: _figure(made), picture_format)


def _figure(made: Mapping[str, Any]) -> Figure:
    steps = made["steps"]
    bars = [min(len(step["ops"]), _MOST_BARS) for step in steps]
    figure = Figure((10.0, 1.0 + sum(0.9 + _INCH_PER_BAR * n for n in bars)), layout="constrained")
    grid: list[Any] = (
        figure.subplots(len(steps), 1, squeeze=False, height_ratios=bars).ravel().tolist()
    )
    time_look, floor_look = look_of(5), look_of(0)
    for place, (axes, step, count) in enumerate(zip(grid, steps, bars, strict=True)):
        ops = step["ops"][:count][::-1]
        milliseconds = [1e3 * op["seconds"] for op in ops]
        axes.barh(range(count), milliseconds, color=time_look["color"], label="measured")
        floors = [1e3 * min(op["floor_s"], op["seconds"]) for op in ops]
        axes.barh(
            range(count), floors, height=0.35, color=floor_look["color"], label="of it, the floor"
        )
        axes.set_yticks(range(count), [f"{op['calls']} x {label_of(op)}" for op in ops])
        axes.set_gid(f"step-{place}")
        axes.set_title(
            f"{title_of(step)}: {1e3 * step['ops_s']:.3g} ms in operations,"
            f" floors {1e3 * step['floor_s']:.3g} ms"
        )
        axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds of a step")
    grid[0].legend(loc="lower right", frameon=False)
    figure.suptitle(f"metainfer profile: {made['model']}, {made['arch']['layers']} layers")
    finish_below(figure, [origin_of(made)])
    return figure
