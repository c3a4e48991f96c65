"""Norms, rope, fp8 groups, cache writes, index codes: which share of rows a program should get.

    python lab/kernels/norm_sweep.py --out DIR [--as sm_89] [--rows 8192] [--only cache.]

Shares are compiled by processes side by side first. Each is checked against the reference, then
timed with a cold L2; a line per shape has each share's part of the rate of a plain copy of as many
bytes. DIR/norm-*.json has the times. The best lines decide `MANY` in
`metainfer/kernels/triton/rows.py` and in `index_codes.py`. Run from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from metainfer.kernels.compare import Poisoned, compare, run  # noqa: E402
from metainfer.kernels.inputs.base import Draw  # noqa: E402
from metainfer.kernels.inputs.load import at_load  # noqa: E402
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS  # noqa: E402
from metainfer.kernels.registry import Registry  # noqa: E402
from metainfer.kernels.triton import index_codes, rows, triton_backends  # noqa: E402
from metainfer.kernels.triton.launch import JitLauncher  # noqa: E402
from metainfer.kernels.triton.portable import PtxLauncher  # noqa: E402
from metainfer.kernels.triton.record import RecordingLauncher  # noqa: E402
from metainfer.ops.base import Load  # noqa: E402
from metainfer.ops.catalogue import OPS  # noqa: E402

PROCESSES = min(16, os.cpu_count() or 1)
ROW_SHARES = [(4096, 32), (4096, 16), (2048, 16), (8192, 32), (8192, 64), (1024, 32), (512, 16)]
INDEX_SHARES = [(64, 8, 4), (64, 8, 2), (64, 4, 4), (64, 4, 6), (128, 8, 2), (32, 4, 8)]
# (op, model, which of its cases): what prefill spends time on.
SHAPES = [
    ("norm.rms_norm", "deepseek-v4-flash", 0),
    ("norm.rms_norm", "deepseek-v4-flash", 1),
    ("norm.rms_norm", "deepseek-v4.1-flash", 0),
    ("norm.add_rms_norm", "deepseek-v3.2", 0),
    ("norm.rms_norm_fp8", "deepseek-v4-flash", 0),
    ("norm.rms_norm_fp8", "deepseek-v4.1-flash", 0),
    ("norm.rms_norm_fp8", "deepseek-v3.2", 0),
    ("rope.rotate", "deepseek-v4-flash", 0),
    ("rope.rotate", "deepseek-v3.2", 0),
    ("rope.rotate", "deepseek-v3.2", 1),
    ("rope.norm_rotate", "deepseek-v4-flash", 0),
    ("quantise.fp8", "deepseek-v4-flash", 0),
    ("quantise.fp8", "deepseek-v4.1-flash", 0),
    ("quantise.fp8", "deepseek-v3.2", 0),
    ("cache.write", "deepseek-v4-flash", 0),
    ("cache.write", "deepseek-v4-flash", 2),
    ("cache.write", "deepseek-v4.1-flash", 0),
    ("cache.write", "deepseek-v4.1-flash", 1),
    ("cache.write", "deepseek-v3.2", 0),
    ("norm.layer_norm_rotate", "deepseek-v3.2", 0),
    ("cache.write_index", "deepseek-v4-flash", 0),
    ("cache.write_index", "deepseek-v3.2", 0),
    ("index.encode_queries", "deepseek-v4-flash", 0),
    ("index.encode_queries", "deepseek-v4-flash", 1),
    ("index.encode_queries", "deepseek-v4.1-flash", 0),
    ("index.encode_queries", "deepseek-v3.2", 0),
]


def of_index(op: str) -> bool:
    return op in ("cache.write_index", "index.encode_queries")


@contextmanager
def sharing(op: str, share: tuple[int, ...]) -> Any:
    """Rows are dealt so, however many there are."""
    module = index_codes if of_index(op) else rows
    both = module.Share(*share)
    with patch.object(module, "MANY", both), patch.object(module, "FEW", both):
        yield


def compile_one(op: str, case: Any, count: int, share: tuple[int, ...], capability: tuple[int, int]) -> None:
    launch = RecordingLauncher(capability, 132)
    with sharing(op, share):
        call = at_load(op, case, Load(count, 32768), Draw(1, "meta"))
        run(Registry(triton_backends(launch)), op, "triton", case, call)
    for unit in launch.units():
        unit.compile(capability)


def checked(registry: Registry, op: str, case: Any, count: int) -> str:
    """The largest relative error, or what is wrong."""
    calls = [at_load(op, case, Load(count, 32768), Draw(1, "cuda", in_place=True)) for _ in range(3)]
    expected = run(registry, op, "reference", case, calls[0])
    with Poisoned():
        actual = run(registry, op, "triton", case, calls[1])
    found = compare(op, case, calls[2], actual, expected)
    return found.problem or f"{found.error:.0e}"


def timed_s(call: Any) -> float:
    return triton.testing.do_bench(call, warmup=5, rep=25, return_mode="median") / 1e3


def copy_s(size: float) -> float:
    """A copy that reads and writes `size` bytes in all."""
    one, other = (torch.empty(int(size) // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    return timed_s(lambda: one.copy_(other))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--as", dest="portable", default="")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--only", default="")
    parser.add_argument("--budget-s", type=float, default=200.0)
    options = parser.parse_args()
    began = time.perf_counter()
    launch: Any = JitLauncher()
    if options.portable:
        launch = PtxLauncher((int(options.portable[3]), int(options.portable[4])))
    registry = Registry((*triton_backends(launch), *REFERENCE_BACKENDS))
    shapes = [(op, OPS[op].cases[model][n]) for op, model, n in SHAPES if options.only in op]
    works = [
        (op, case, options.rows, share, launch.capability)
        for op, case in shapes
        for share in (INDEX_SHARES if of_index(op) else ROW_SHARES)
    ]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for work, done in [(work, pool.submit(compile_one, *work)) for work in works]:
            if done.exception():
                print("does not compile:", work, str(done.exception())[:200])
    print(f"{len(works)} compiled in {time.perf_counter() - began:.0f} s")
    record = []
    for op, case in shapes:
        if time.perf_counter() - began > options.budget_s:
            print("no time left")
            break
        record += measured(registry, op, case, options.rows)
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.out / f"norm-{options.portable or 'native'}-{options.rows}.json"
    name.write_text(json.dumps(record, indent=1))
    return 0


def measured(registry: Registry, op: str, case: Any, count: int) -> list[dict[str, Any]]:
    """A line is printed: the copy's time, then each share's time and part of the copy's rate."""
    size = OPS[op].cost(case, Load(count, 32768)).bytes
    floor_s = copy_s(size)
    found, words = [], []
    for share in INDEX_SHARES if of_index(op) else ROW_SHARES:
        with sharing(op, share):
            try:
                error = checked(registry, op, case, count)
                call = at_load(op, case, Load(count, 32768), Draw(2, "cuda", in_place=True))
                seconds = timed_s(lambda: run(registry, op, "triton", case, call))  # noqa: B023
            except Exception as problem:
                words.append(f"{share} {str(problem)[:60]}")
                continue
        found.append({"op": op, "case": str(case), "rows": count, "share": share, "us": seconds * 1e6,
                      "copy_us": floor_s * 1e6, "bytes": size, "check": error})  # fmt: skip
        words.append(f"{'/'.join(map(str, share))} {seconds * 1e6:.1f} {floor_s / seconds:.0%} ({error})")
    print(f"{op} {str(case)[str(case).index('(') :][:60]} copy {floor_s * 1e6:.1f}: " + " | ".join(words), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
