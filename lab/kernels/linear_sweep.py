"""Tiles of products of rows in fp8 groups: which are right, and how fast, beside torch's product.

    python lab/kernels/linear_sweep.py --out DIR [--as sm_89] [--rows 1,8,64,8192] [--budget-s 60]

The quantised matrices of DeepSeek-V4-Flash. Ways are compiled by processes side by side first. Each
is compared with the reference (error: the largest, over the largest number), then timed in series
over copies of the weight that a cache does not hold. A line for each shape has the table's tile,
the best, and torch's `scaled_mm`; DIR/linear-*.json has all ways. Times of few rows are to be seen
beside reading the weight at 4.3 TB/s, of many beside 1,106 to 1,151 TFLOP/s of torch (H200). The
best lines decide `few_tile` and `tall_tile` in `metainfer/kernels/triton/product.py`. Run from the
root of the repository.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from metainfer.kernels.compare import Poisoned, near  # noqa: E402
from metainfer.kernels.inputs.base import Draw  # noqa: E402
from metainfer.kernels.inputs.load import at_load  # noqa: E402
from metainfer.kernels.reference import BACKENDS as REFERENCES  # noqa: E402
from metainfer.kernels.timing import Stopwatch  # noqa: E402
from metainfer.kernels.torch_products import scaled  # noqa: E402
from metainfer.kernels.triton import linear, product  # noqa: E402
from metainfer.kernels.triton.launch import JitLauncher, Launcher, has_fp8  # noqa: E402
from metainfer.kernels.triton.portable import PtxLauncher  # noqa: E402
from metainfer.kernels.triton.product import Sizes, Tile, Weight  # noqa: E402
from metainfer.kernels.triton.record import RecordingLauncher  # noqa: E402
from metainfer.ops.base import Load  # noqa: E402
from metainfer.ops.catalogue import OPS  # noqa: E402

PROCESSES = min(16, os.cpu_count() or 1)
COLD_BYTES = 150e6  # of the weights of one series
MOST_CALLS = 24
ROWS_OP, GROUPED_OP = "linear.fp8_rows", "linear.grouped_fp8_rows"
SHAPES = [(op, case) for op in (ROWS_OP, GROUPED_OP) for case in OPS[op].cases["deepseek-v4-flash"]]
RUN = {ROWS_OP: linear.fp8_rows, GROUPED_OP: linear.grouped_fp8_rows}
REFERENCE = {backend.op: backend.run for backend in REFERENCES}


def sizes_of(case: Any) -> Sizes:
    return Sizes(getattr(case, "groups", 1), case.rows, case.columns, case.block, case.group)


def ways(launch: Launcher, case: Any, rows: int) -> dict[str, Tile]:
    """Name -> tile; the first is the table's."""
    sizes, form = sizes_of(case), "fp8" if has_fp8(launch) else "half"
    if rows <= product.FEW_ROWS:
        table = product.few_tile(launch, sizes, meta_weight(case), form, rows)
        return named(table, few_ways(launch, sizes, table))
    form = form if has_fp8(launch) else "bf16"
    table = product.tall_tile(launch, sizes, meta_weight(case), form, rows)
    return named(table, tall_ways(launch, table))


def few_ways(launch: Launcher, sizes: Sizes, table: Tile) -> list[Tile]:
    found = [replace(table, ticket=not table.ticket)] if table.splits > 1 else []
    for outputs, step, warps, stages in (
        (64, 128, 4, 3), (64, 128, 4, 6), (64, 256, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4), (32, 128, 4, 6),
    ):  # fmt: skip
        step = min(step, sizes.group)
        tile = replace(table, outputs=outputs, step=step, warps=warps, stages=stages)
        tiles, steps = sizes.groups * triton.cdiv(sizes.rows, outputs), triton.cdiv(sizes.columns, step)
        for programs in (2, 4):
            wanted = max(1, min(programs * launch.multiprocessors // tiles, 16, steps))
            found.append(replace(tile, splits=triton.cdiv(steps, triton.cdiv(steps, wanted))))
    return found


def tall_ways(launch: Launcher, table: Tile) -> list[Tile]:
    step = table.step
    found = [
        (128, 128, step, 8, 3), (128, 128, step, 8, 2), (64, 128, step, 4, 3), (128, 64, step, 4, 3),
        (128, 64, step, 8, 3), (64, 64, step, 4, 3), (128, 128, step // 2, 8, 3), (64, 128, step // 2, 4, 4),
    ]  # fmt: skip
    if launch.capability >= (9, 0):
        found += [(128, 128, step, 8, 5), (64, 256, step, 8, 3), (64, 256, step, 4, 3), (128, 256, step, 8, 3)]
    return [Tile(*one) for one in found]


def named(table: Tile, others: list[Tile]) -> dict[str, Tile]:
    found = {f"table {label(table)}": table}
    for tile in others:
        if tile != table:
            found[label(tile)] = tile
    return found


def label(tile: Tile) -> str:
    slices = f" {tile.splits}{'t' if tile.ticket else 'p'}" if tile.splits > 1 else ""
    return f"{tile.rows}x{tile.outputs}x{tile.step} {tile.warps}w {tile.stages}s{slices}"


def meta_weight(case: Any) -> Weight:
    """Of the case's shape, without numbers."""
    codes, scales = at_load(op_of(case), case, Load(1), Draw(0, "meta")).weights
    return linear.prepare_codes(case, codes, scales)


def op_of(case: Any) -> str:
    return GROUPED_OP if hasattr(case, "groups") else ROWS_OP


def units(capability: tuple[int, int], count: int, loads: list[tuple[Any, int]]) -> list[Any]:
    """What all ways compile, each once."""
    launch = RecordingLauncher(capability, count)
    for case, rows in loads:
        op = op_of(case)
        arguments = at_load(op, case, Load(rows), Draw(0, "meta")).arguments
        for tile in ways(launch, case, rows).values():
            RUN[op](launch, case, meta_weight(case), *arguments, tile=tile)
    return list(launch.units())


def compile_one(unit: Any, capability: tuple[int, int]) -> None:
    unit.compile(capability)


def torch_product(case: Any, weight: scaled.Scaled, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """With few rows too, where the backend hands them to Triton."""
    with_few = scaled.FEW_ROWS
    scaled.FEW_ROWS = 0
    try:
        run = scaled.grouped_fp8_rows if op_of(case) == GROUPED_OP else scaled.fp8_rows
        return run(JitLauncher(), case, weight, codes, scales)
    finally:
        scaled.FEW_ROWS = with_few


class Shape:
    """One shape on the device: its inputs, copies of the weight, and what is expected."""

    def __init__(self, case: Any, rows: int) -> None:
        self.case, self.rows, self.op = case, rows, op_of(case)
        self.call = at_load(self.op, case, Load(rows), Draw(1, "cuda", in_place=True))
        codes, scales = self.call.weights
        copies = int(max(1, min(MOST_CALLS, COLD_BYTES // codes.numel()))) if rows <= 1024 else 1
        self.weights = [(codes.clone(), scales.clone()) for _ in range(copies)]
        self.expected = REFERENCE[self.op](case, self.call.weights, *self.call.arguments)

    def measured(self, run: Callable[..., torch.Tensor], prepare: Callable[..., Any]) -> dict[str, Any]:
        """run(case, prepared weight, codes, scales)."""
        try:
            prepared = [prepare(self.case, *weight) for weight in self.weights]
            with Poisoned():
                actual = run(self.case, prepared[0], *self.call.arguments)
            found = near(actual, self.expected, OPS[self.op].tolerance.of(self.case.dtype))
            if found.problem:
                return {"failed": found.problem}
            calls = [partial(run, self.case, weight, *self.call.arguments) for weight in prepared]
            us = Stopwatch("cuda").median_s(calls, budget_s=0.02) * 1e6
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {str(error)[:160]}"}
        cost = OPS[self.op].cost(self.case, Load(self.rows))
        return {
            "us": us,
            "error": found.error,
            "tflops": cost.flops / us / 1e6,
            "tbytes_per_s": cost.bytes / us / 1e6,
        }


def told(record: dict[str, Any] | None) -> str:
    if record is None:
        return "none"
    if "failed" in record:
        return f"failed ({record['failed'][:60]})"
    return f"{record['us']:.1f} us {record['tflops']:.0f} TF {record['tbytes_per_s']:.2f} TB/s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--as", dest="portable", default="", choices=("", "sm_80", "sm_89"))
    parser.add_argument("--rows", default="1,8,64,8192")
    parser.add_argument("--budget-s", type=float, default=60.0)
    options = parser.parse_args()
    began = time.monotonic()
    launch: Any = JitLauncher()
    if options.portable:
        launch = PtxLauncher((int(options.portable[3]), int(options.portable[4])))
    loads = [(case, int(rows)) for rows in options.rows.split(",") for _, case in SHAPES]
    wanted = units(launch.capability, launch.multiprocessors, loads)
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for unit, done in [(unit, pool.submit(compile_one, unit, launch.capability)) for unit in wanted]:
            if done.exception():
                print(f"{unit.name} {unit.named_constants()}: {str(done.exception())[:120]}")
    print(f"compiled {len(wanted)} in {time.monotonic() - began:.0f} s", flush=True)
    records: list[dict[str, Any]] = []
    for case, rows in loads:
        if time.monotonic() - began > options.budget_s:
            print("no time left for the rest")
            break
        shape = Shape(case, rows)
        found = {
            name: shape.measured(partial(with_tile, launch, tile), linear.prepare_codes)
            for name, tile in ways(launch, case, rows).items()
        }
        peer = None if options.portable else shape.measured(torch_product, scaled.prepare)
        right = {name: one for name, one in found.items() if "us" in one}
        best = min(right, key=lambda name: right[name]["us"], default="")
        table = next(iter(found))
        print(
            f"{getattr(case, 'groups', 1)}x{case.rows}x{case.columns} {rows:>5}: {table} {told(found[table])}"
            f" error {found[table].get('error', 0):.0e} | best {best} {told(found.get(best))} | torch {told(peer)}",
            flush=True,
        )
        records.append({"case": repr(case), "rows": rows, "ways": found, "torch": peer})
        for name, one in found.items():
            if "failed" in one:
                print(f"  {name}: {one['failed']}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"linear-{options.portable or 'native'}.json"
    path.write_text(json.dumps(records, indent=1))
    return 0


def with_tile(launch: Launcher, tile: Tile, case: Any, weight: Weight, *arguments: torch.Tensor) -> torch.Tensor:
    return RUN[op_of(case)](launch, case, weight, *arguments, tile=tile)


if __name__ == "__main__":
    sys.exit(main())
