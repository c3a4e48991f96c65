"""The picture of a record of `bench comm`: every sample of every way, against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter, StrMethodFormatter

from metainfer.bench.plot import finish_below, in_style, look_of, points_of
from metainfer.bench.plot_stages import origin_of
from metainfer.core.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FLOOR: Mapping[str, Any] = {"color": "0.3", "linestyle": ":", "lw": 1.4}


def draw_comm(made: Mapping[str, Any], picture_format: str = "svg") -> bytes:
    return in_style(lambda: _figure(made), picture_format)


def _figure(made: Mapping[str, Any]) -> Figure:
    """A panel for each operation."""
    operations = made["load"]["operations"]
    rows = -(-len(operations) // 2)
    figure = Figure((10.0, 3.6 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False).ravel().tolist()
    names = list(dict.fromkeys(point["name"] for point in made["points"]))
    for operation in operations:
        points = [point for point in made["points"] if point["operation"] == operation]
        _panel(panels.pop(0), operation, points, names)
    for axes in panels:
        axes.remove()
    ranks, threads = made["load"]["ranks"], made["threads"]
    figure.suptitle(
        f"metainfer bench comm: {ranks} ranks of {threads} threads\n"
        "points: samples, of the slowest rank; lines: medians; dotted: floor"
    )
    handles = [Line2D([], [], **look_of(n), label=name) for n, name in enumerate(names)]
    finish_below(figure, [origin_of(made)], handles)
    return figure


def _panel(
    axes: Axes, operation: str, points: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> None:
    """Time against bytes, both by powers of ten."""
    timed = [point for point in points if point["seconds"]]
    for n, name in enumerate(names):
        own = [point for point in timed if point["name"] == name]
        if not own:
            continue
        sizes = [point["bytes"] for point in own]
        middles = [point["median_s"] * 1e6 for point in own]
        axes.plot(sizes, middles, **{**look_of(n), "marker": ""}, lw=1.2, gid=f"{operation}-{n}")
        for point in own:
            taken = [seconds * 1e6 for seconds in point["seconds"]]
            axes.plot([point["bytes"]] * len(taken), taken, **points_of(n))
    floors = {point["bytes"]: point["floor_s"] * 1e6 for point in points}
    axes.plot(list(floors), list(floors.values()), **_FLOOR, gid=f"{operation}-floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(floors))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, place: format_bytes(int(size))))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params("x", labelrotation=30)
    axes.set_xlabel("bytes of each rank, log scale")
    axes.set_ylabel("us, log scale")
    axes.set_title(operation)
