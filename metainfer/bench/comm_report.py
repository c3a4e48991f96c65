"""What is made of the points of `bench comm`: the JSON record, tables, and a route."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from metainfer.bench.comm_settings import CommLoad
from metainfer.bench.ops_report import format_us
from metainfer.bench.record import prose, provenance, table
from metainfer.comm.contest import Links, Point, rounded_up
from metainfer.comm.router import ways_of
from metainfer.core.errors import MetainferError
from metainfer.core.units import format_bytes, format_seconds
from metainfer.plan.routes import PREFILL, route
from metainfer.plan.wires import PLAIN

_MOST_SPREAD = 2.0


def record(
    load: CommLoad,
    threads: int,
    links: Links,
    points: Sequence[Point],
    missing: Mapping[str, str],
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON record.

    Args:
        threads: of each rank.
        missing: peer -> why it was not measured.
    """
    return {
        **provenance(),
        "machine": dict(machine),
        "load": asdict(load),
        "threads": threads,
        "links": asdict(links),
        "peers_missing": dict(missing),
        "points": [_entry(point, links, load.ranks) for point in points],
        "sizes_not_reached": _not_reached(load, points),
        "routes": [line for operation in load.operations for line in _route(points, operation)],
    }


def _entry(point: Point, links: Links, ranks: int) -> dict[str, Any]:
    entry = {**asdict(point), "floor_s": links.floor_s(point.operation, point.bytes, ranks)}
    if point.seconds:
        middle = statistics.median(point.seconds)
        entry |= {
            "median_s": middle,
            "low_s": min(point.seconds),
            "high_s": max(point.seconds),
            "of_floor": entry["floor_s"] / middle,
        }
    return entry


def _not_reached(load: CommLoad, points: Sequence[Point]) -> list[int]:
    reached = {point.bytes for point in points}
    sizes = (rounded_up(size, load.ranks) for size in load.sizes)
    return [size for size in sizes if size not in reached]


def _route(points: Sequence[Point], operation: str) -> list[str]:
    """Which ways would be taken, for exact sums in the order of ranks."""
    rivals = [
        way.rival for way in ways_of(points) if (way.operation, way.wire) == (operation, PLAIN)
    ]
    try:
        lines = route(operation, PREFILL, rivals).explain()
    except MetainferError as error:
        return [str(error)]
    return [line.replace(f" in {PREFILL}", "") for line in lines]


def too_noisy(points: Sequence[Point]) -> bool:
    """Whether other work on the machine decides more than the ways do: half of the points have
    samples of which one took more than twice as long as another."""
    spreads = [max(point.seconds) / min(point.seconds) for point in points if point.seconds]
    return bool(spreads) and statistics.median(spreads) > _MOST_SPREAD


def text_report(made: Mapping[str, Any]) -> str:
    """The record as a table for each operation."""
    load, links = made["load"], made["links"]
    lines = [
        prose(
            f"{load['ranks']} ranks of {made['threads']} threads; measured first, all at once: a"
            f" flag {format_seconds(links['flag_s'])}, a copy out of another rank's memory"
            f" {links['bytes_per_s'] / 1e9:.3g} GB/s"
        )
    ]
    lines += [prose(f"{name}: {why}") for name, why in made["peers_missing"].items()]
    for operation in load["operations"]:
        points = [point for point in made["points"] if point["operation"] == operation]
        for wire in dict.fromkeys(point["wire"] for point in points):
            ways = [point for point in points if point["wire"] == wire]
            travels = "" if wire == PLAIN else f", travelling in {wire}"
            lines += ["", f"{operation}{travels}; times in us, of the slowest rank"]
            lines.append(_table(ways))
    for point in made["points"]:
        if point["wrong"]:
            lines.append(
                prose(
                    f"{point['operation']} by {point['name']} brought wrong data at"
                    f" {format_bytes(point['bytes'])}: {point['wrong']}"
                )
            )
    if left := made["sizes_not_reached"]:
        sizes = ", ".join(format_bytes(size) for size in left)
        lines.append(prose(f"not reached within {load['budget_s']:g} s: {sizes}"))
    return "\n".join([*lines, "", *(prose(line) for line in made["routes"])])


def _table(points: Sequence[Mapping[str, Any]]) -> str:
    """A line for each size, a column for each way; the best against the floor."""
    names = list(dict.fromkeys(point["name"] for point in points))
    rows = []
    for size in dict.fromkeys(point["bytes"] for point in points):
        found = {point["name"]: point for point in points if point["bytes"] == size}
        floor_s = next(iter(found.values()))["floor_s"]
        times = {n: found[n]["median_s"] for n in names if "median_s" in found.get(n, {})}
        best = f"{floor_s / min(times.values()):.0%}" if times else ""
        cells = [_cell(found.get(name)) for name in names]
        rows.append([format_bytes(size), format_us(floor_s), *cells, best])
    return table(["bytes of a rank", "floor", *names, "floor of best"], rows)


def _cell(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return ""
    return "wrong" if point["wrong"] else format_us(point["median_s"])
