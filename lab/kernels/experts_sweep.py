"""Tiles of the routed experts: which are right, and how fast, beside their floor.

    python lab/kernels/experts_sweep.py --out DIR [--as sm_89] [--rows 1,8,64,512,8192] [--budget-s 90]

The experts of DeepSeek-V4-Flash (256 of 4096 x 2048 in fp4, 6 for each row, rows in fp8 groups) at
random routing, weights drawn on the device. Ways are compiled by processes side by side first. Each
is checked on some rows against the reference, whole calls are timed, and the launches of the way
that the table has are timed one by one. DIR/experts-*.json has all of it. Run from the root of the
repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from metainfer.kernels.inputs.base import Draw  # noqa: E402
from metainfer.kernels.inputs.moe import experts_fp8_rows as inputs_of  # noqa: E402
from metainfer.kernels.reference.moe import experts_fp8_rows as reference  # noqa: E402
from metainfer.kernels.triton import moe, route  # noqa: E402
from metainfer.kernels.triton.launch import JitLauncher, Launcher, has_fp8  # noqa: E402
from metainfer.kernels.triton.moe_tiles import Tile, Tiles, tiles_of  # noqa: E402
from metainfer.kernels.triton.portable import PtxLauncher  # noqa: E402
from metainfer.ops.base import Load  # noqa: E402
from metainfer.ops.catalogue import OPS  # noqa: E402

CASE = OPS["moe.experts_fp8_rows"].cases["deepseek-v4-flash"][0]
ROUTE = OPS["moe.route_learned"].cases["deepseek-v4-flash"][0]
PROCESSES = min(16, os.cpu_count() or 1)
BYTES_PER_S = 4.3e12  # measured on an H200
FLOPS_PER_S = 1.15e15  # torch's block-fp8 product there
CHECKED = 48  # rows that are compared


def ways(rows: int, capability: tuple[int, int]) -> dict[str, Tiles]:
    """Name -> tiles; the first is the table's."""
    table = tiles_of(CASE, rows, capability, capability >= (8, 9))
    found = {"table": table}
    native = capability == (9, 0)
    if rows <= 64:
        for swap in (True, False):
            for gate, down, step, warps, stages in (
                (32, 64, 128, 4, 3), (32, 64, 128, 4, 4), (64, 64, 128, 4, 4), (64, 128, 128, 4, 3),
                (64, 128, 128, 4, 4), (64, 128, 128, 8, 4), (16, 32, 128, 4, 4), (32, 64, 256, 4, 3),
            ):  # fmt: skip
                if swap and not native and step == 256:
                    continue
                tile = Tile(gate, step, warps, stages, swap)
                found[name_of(16, tile, down)] = Tiles(16, tile, replace(tile, channels=down))
        return found
    heights = (16, 32, 64) if rows <= 1024 else (64, 128)
    for height in heights:
        for gate, down, warps, stages, swap in (
            (64, 128, 4, 3, False), (64, 128, 4, 4, False), (64, 128, 8, 3, False), (64, 128, 8, 4, False),
            (64, 128, 4, 3, True), (64, 128, 8, 3, True), (128, 256, 8, 3, False), (128, 256, 8, 3, True),
            (128, 128, 8, 2, False), (32, 64, 4, 4, True), (32, 64, 4, 3, False),
        ):  # fmt: skip
            if height == 128 and warps == 4 and gate >= 64:
                continue
            tile = Tile(gate, 128, warps, stages, swap)
            found[name_of(height, tile, down)] = Tiles(height, tile, replace(tile, channels=down))
    if rows > 1024:
        best = Tile(64, 128, 8, 3)
        for height, gate, down, registers in ((64, 64, 128, 168), (128, 32, 64, 168)):
            tile = Tile(gate, 128, 4, 3, registers=registers)
            name = f"{name_of(height, tile, down)}, {registers} registers"
            found[name] = Tiles(height, tile, replace(tile, channels=down))
        for band in (2, 4, 16, 32):
            tile = replace(best, band=band)
            found[f"{name_of(128, tile, 128)} band {band}"] = Tiles(128, tile, replace(tile, channels=128))
    return found


def name_of(height: int, tile: Tile, down: int) -> str:
    form = "W x^T" if tile.swap else "x W^T"
    return f"{height} slots x {tile.channels}/{down} x {tile.step}, {tile.warps} warps, {tile.stages} stages, {form}"


def launcher(portable: str) -> Launcher:
    return PtxLauncher((int(portable[3]), int(portable[4]))) if portable else JitLauncher()


def warm(launch: Launcher, listed: list[tuple[int, Tiles]]) -> None:
    """Compiles ways by running them once, over weights that nobody wrote."""
    call = inputs_of(CASE, Draw(0, "meta"), 0)
    matrices = moe.prepare_fp8_rows(CASE, *call.weights)
    prepared = type(matrices)(*(type(m)(m.form, *map(unwritten, m[1:])) for m in matrices))
    for rows, tiles in listed:
        # Kernels depend on whether there is one row, and on nothing else that is not in the tiles.
        arguments = arguments_of(min(rows, 200), 0)
        try:
            moe.experts_fp8_rows(launch, CASE, prepared, *arguments, tiles=tiles)
            torch.cuda.synchronize()
        except Exception as error:
            print(rows, tiles, str(error)[:120].replace("\n", " "), flush=True)


def unwritten(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, device="cuda")


class Inputs:
    """Weights, as they come and prepared."""

    def __init__(self) -> None:
        self.weights = inputs_of(CASE, Draw(0, "cuda", in_place=True), 0).weights
        self.prepared = moe.prepare_fp8_rows(CASE, *self.weights)


def arguments_of(rows: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)
    codes = torch.randint(0, 120, (rows, CASE.width), generator=generator, device="cuda")
    signs = torch.randint(0, 2, codes.shape, generator=generator, device="cuda") * 128
    groups = rows, CASE.width // CASE.group
    scales = torch.randint(117, 123, groups, generator=generator, device="cuda")
    scores = torch.rand(rows, CASE.experts, generator=generator, device="cuda")
    weights, ids = scores.topk(CASE.selected, dim=1)
    return (codes + signs).byte(), scales.byte(), ids, weights / 6


def check(launch: Launcher, inputs: Inputs, tiles: Tiles, rows: int, expected: Any) -> float:
    arguments = arguments_of(rows, 0)
    y = moe.experts_fp8_rows(launch, CASE, inputs.prepared, *arguments, tiles=tiles)
    some = picked(rows)
    error = float((y[some] - expected).abs().max() / expected.abs().max())
    if not error <= OPS["moe.experts_fp8_rows"].tolerance.of("bfloat16"):
        raise ValueError(f"off by {error:.3g}")
    return error


def picked(rows: int) -> torch.Tensor:
    return torch.linspace(0, rows - 1, min(rows, CHECKED), device="cuda").long().unique()


def expected_of(inputs: Inputs, rows: int) -> torch.Tensor:
    some = picked(rows)
    codes, scales, ids, weights = (part[some] for part in arguments_of(rows, 0))
    return reference(CASE, inputs.weights, codes, scales, ids, weights)


def seconds(run: Callable[[int], Any], series: int, captured: bool) -> float:
    """Median time of a call, different inputs in turn; by a CUDA graph where launches would be
    what takes the time."""
    for n in range(series):
        run(n)
    torch.cuda.synchronize()
    calls: Callable[[], None] = lambda: [run(n) for n in range(series)] and None  # noqa: E731
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        calls = graph.replay
    times = []
    began = time.monotonic()
    while len(times) < 3 or (time.monotonic() - began < 0.12 and len(times) < 20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / series)
    return sorted(times)[len(times) // 2]


class Timed:
    """A launcher that times each launch by itself, many times over."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self.capability, self.multiprocessors = launch.capability, launch.multiprocessors
        self.interpreted = launch.interpreted
        self.found: list[tuple[str, float]] = []

    def __call__(self, kernel: Any, grid: Any, *arguments: Any, **named: Any) -> None:
        once = partial(self._launch, kernel, grid, *arguments, **named)
        self.found.append((kernel.__name__, seconds(lambda _: once(), 4, True)))


def floor_s(rows: int) -> tuple[float, float, float]:
    """(floor, operations, bytes that experts which are chosen are expected to have)."""
    cost = OPS["moe.experts_fp8_rows"].cost(CASE, Load(rows, rows))
    hit = CASE.experts * (1 - (1 - CASE.selected / CASE.experts) ** rows)
    moved = hit * 3 * CASE.width * CASE.inner * 0.53125
    return max(cost.flops / FLOPS_PER_S, moved / BYTES_PER_S), cost.flops, moved


def measure(launch: Launcher, inputs: Inputs, rows: int, until: float) -> list[dict[str, Any]]:
    floor, flops, moved = floor_s(rows)
    print(f"\n{rows} rows: floor {floor * 1e6:.1f} us, {moved / 1e6:.0f} MB", flush=True)
    expected = expected_of(inputs, rows)
    series = {1: 8, 8: 4}.get(rows, 2 if rows <= 512 else 1)
    rows_of = [arguments_of(rows, n) for n in range(series)]
    records = []
    for name, tiles in ways(rows, launch.capability).items():
        if time.monotonic() > until:
            break
        record: dict[str, Any] = {"rows": rows, "way": name, "floor_us": floor * 1e6}
        try:
            record["error"] = check(launch, inputs, tiles, rows, expected)

            def run(n: int, tiles: Tiles = tiles) -> Any:
                return moe.experts_fp8_rows(launch, CASE, inputs.prepared, *rows_of[n], tiles=tiles)

            took = seconds(run, series, captured=True)
            record.update(us=took * 1e6, tflops=flops / took / 1e12, tbs=moved / took / 1e12)
            print(
                f"{took * 1e6:9.1f} us {record['tflops']:6.0f} TFLOP/s {record['tbs']:5.2f} TB/s"
                f" error {record['error']:.1e} | {name}",
                flush=True,
            )
        except Exception as error:  # the others are still to be measured
            record["failed"] = f"{type(error).__name__}: {str(error)[:120]}"
            print(f"   failed: {record['failed']} | {name}", flush=True)
        records.append(record)
    good = [record for record in records if "us" in record]
    if good:
        best = min(good, key=lambda record: record["us"])
        timed = Timed(launch)
        tiles = ways(rows, launch.capability)[best["way"]]
        moe.experts_fp8_rows(timed, CASE, inputs.prepared, *rows_of[0], tiles=tiles)
        best["launches"] = [(name, took * 1e6) for name, took in timed.found]
        print("best", best["way"], "; ".join(f"{n} {t:.1f}" for n, t in best["launches"]), flush=True)
    return records


def routing(launch: Launcher, counts: list[int]) -> None:
    """Times of the learned choice, for the record."""
    gate = torch.randn(ROUTE.experts, ROUTE.width, device="cuda") * ROUTE.width**-0.5
    prepared = route.prepare(ROUTE, gate, torch.randn(ROUTE.experts, device="cuda"))
    for rows in counts:
        x = torch.randn(rows, ROUTE.width, device="cuda").bfloat16()
        took = seconds(lambda _, x=x: route.route_learned(launch, ROUTE, prepared, x), 4, True)
        print(f"route_learned {rows:5} rows: {took * 1e6:.1f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--as", dest="portable", default="", choices=("", "sm_80", "sm_89"))
    parser.add_argument("--rows", default="1,8,64,512,8192")
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--warm", default="", help="share/shares: compile only")
    options = parser.parse_args()
    counts = [int(rows) for rows in options.rows.split(",")]
    launch = launcher(options.portable)
    if options.warm:
        share, of = map(int, options.warm.split("/"))
        listed = [(rows, tiles) for rows in counts for tiles in ways(rows, launch.capability).values()]
        warm(launch, listed[share::of])
        return 0
    began = time.monotonic()
    command = [sys.executable, __file__, *sys.argv[1:]]
    shares = [subprocess.Popen([*command, "--warm", f"{n}/{PROCESSES}"], cwd=ROOT) for n in range(PROCESSES)]
    for share in shares:
        try:
            share.wait(max(1.0, began + options.budget_s / 2 - time.monotonic()))
        except subprocess.TimeoutExpired:
            share.kill()
    print(f"compiled in {time.monotonic() - began:.0f} s; codes: {has_fp8(launch)}", flush=True)
    inputs = Inputs()
    records = []
    until = began + options.budget_s
    for place, rows in enumerate(counts):
        left = (until - time.monotonic()) / (len(counts) - place)
        records += measure(launch, inputs, rows, time.monotonic() + left)
    routing(launch, counts)
    options.out.mkdir(parents=True, exist_ok=True)
    where = options.out / f"experts-{options.portable or 'native'}.json"
    where.write_text(json.dumps(records, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
