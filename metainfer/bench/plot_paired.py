"""The picture of a record of `bench paired`: a dot for each pair, the mean and its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from metainfer.bench.plot import finish_below, in_style, points_of
from metainfer.bench.plot_stages import origin_of


def draw_paired(made: Mapping[str, Any], picture_format: str = "svg") -> bytes:
    return in_style(lambda: _figure(made), picture_format)


def _figure(made: Mapping[str, Any]) -> Figure:
    works = made["works"]
    figure = Figure((8.0, 1.3 + 1.5 * len(works)), layout="constrained")
    for row, (axes, work) in enumerate(
        zip(figure.subplots(len(works), 1, squeeze=False).ravel(), works, strict=True)
    ):
        effects = [100 * effect for effect in work["effects"]]
        # One above the other in the order in which they were measured.
        heights = [0.2 + 0.6 * n / max(len(effects) - 1, 1) for n in range(len(effects))]
        axes.plot(effects, heights, **points_of(0), gid=f"pairs-{row}")
        found = work["effect"]
        low, mean, high = (100 * found[name] for name in ("low", "mean", "high"))
        axes.plot([low, high], [0, 0], "-k", lw=2.0, gid=f"interval-{row}")
        axes.plot([mean], [0], "dk", ms=7, gid=f"mean-{row}")
        axes.axvline(0.0, color="0.5", lw=0.8, ls="--")
        axes.set_yticks([])
        axes.set_ylim(-0.25, 1.0)
        axes.set_title(
            f"{work['name']}: {mean:+.2f} % ({low:+.2f} to {high:+.2f}), p = {found['p_t']:.2g},"
            f" {found['pairs']} pairs"
        )
    axes.set_xlabel("B's rate over A's, %: dots from below are pairs in order; bar: 95 % interval")
    figure.suptitle(f"metainfer bench paired: {made['model']}\nA: {made['a']}    B: {made['b']}")
    finish_below(figure, [origin_of(made)])
    return figure
