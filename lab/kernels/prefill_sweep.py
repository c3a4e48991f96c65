"""Tiles for sparse prefill: which is right, and how fast, at the shapes of the models.

    python lab/kernels/prefill_sweep.py --out DIR [--as sm_89] [--shapes csa64,glm64] [--budget-s 200]

Tiles are compiled by processes side by side first. Each is then checked against the reference at a
few rows, with poisoned memory, and timed. One line per shape and tile; DIR/prefill-*.jsonl has all
of them (a candidate that breaks its process or hangs is left behind). Run from the root of the
repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from metainfer.kernels.inputs.attention import sparse_prefill_at_load  # noqa: E402
from metainfer.kernels.inputs.base import Draw  # noqa: E402
from metainfer.kernels.reference import attention as reference  # noqa: E402
from metainfer.kernels.triton import attention_prefill  # noqa: E402
from metainfer.kernels.triton.attention_prefill import Tile, tile_of  # noqa: E402
from metainfer.kernels.triton.launch import JitLauncher, shared_limit  # noqa: E402
from metainfer.kernels.triton.portable import PtxLauncher  # noqa: E402
from metainfer.ops.attention import AttentionCase  # noqa: E402
from metainfer.ops.base import Load  # noqa: E402

PROCESSES = min(16, os.cpu_count() or 1)
CHECKED_ROWS = 6
STALLED_S = 40.0


@dataclass(frozen=True)
class Shape:
    case: AttentionCase
    rows: int
    tokens: int


_MLA = {"window": 0, "ratio": 1, "topk": 2048, "rope_extra": 64, "scale": 0.0625, "sink": False}
SHAPES = {
    # The aims: 8,192 x 64 x 640 of 512, 4,096 x 64 and 128 x 2,048 of 576.
    "csa64": Shape(AttentionCase(64, 512, 128, ratio=4, topk=512), 8192, 40960),
    "glm64": Shape(AttentionCase(64, 512, **_MLA), 4096, 32768),
    "v32-128": Shape(AttentionCase(128, 512, **_MLA), 4096, 32768),
    # Ranks of 2, 4 and 8.
    "csa32": Shape(AttentionCase(32, 512, 128, ratio=4, topk=512), 8192, 40960),
    "csa8": Shape(AttentionCase(8, 512, 128, ratio=4, topk=512), 8192, 40960),
    "glm8": Shape(AttentionCase(8, 512, **_MLA), 4096, 32768),
    # Rows that share their keys.
    "hca64": Shape(AttentionCase(64, 512, 128, ratio=128), 8192, 40960),
    "hca8": Shape(AttentionCase(8, 512, 128, ratio=128), 8192, 40960),
    "window64": Shape(AttentionCase(64, 512, 128), 8192, 40960),
    # Entries as bytes: the tile of the table alone.
    "csa64-fp8": Shape(AttentionCase(64, 512, 128, ratio=4, topk=512, entry_format="v4_fp8"), 8192, 40960),
    "csa64-fp4": Shape(AttentionCase(64, 512, 128, ratio=2, topk=512, entry_format="v41_fp4"), 8192, 40960),
    "glm64-fp8": Shape(AttentionCase(64, 512, **_MLA, entry_format="mla_fp8"), 4096, 32768),
}


def fits(case: AttentionCase, tile: Tile, capability: tuple[int, int]) -> bool:
    """Whether queries and pairs of tiles fit in shared memory, and sums in half of the registers."""
    tiles_held = 3 if tile.stages == 1 else 2 * (tile.stages - 1)
    held = tile.heads + tiles_held * tile.keys
    return 2 * held * case.key_width <= shared_limit(capability) and tile.heads * case.width <= 128 * 32 * tile.warps


def tiles(case: AttentionCase, capability: tuple[int, int]) -> list[Tile]:
    """Candidates, the table's own first; where rows share their keys, with its heads alone."""
    own = tile_of(case, capability)
    if case.entry_format != "dense":
        return [own]
    found = [
        Tile("pairs", heads, keys, warps, stages)
        for heads in ((16,) if case.heads <= 16 else (16, 32, 64))
        for keys in (16, 32, 64)
        for warps in (4, 8)
        for stages in (1, 2, 3)
        if case.topk or heads == own.heads
    ]
    return list(dict.fromkeys([own, *(tile for tile in found if fits(case, tile, capability))]))


def launcher(portable: str) -> Any:
    return PtxLauncher((int(portable[3]), int(portable[4]))) if portable else JitLauncher()


def call(launch: Any, shape: Shape, tile: Tile, rows: int) -> Any:
    draw = Draw(7, "cuda", in_place=True)
    tokens = max(rows, shape.tokens) if rows == shape.rows else shape.case.topk * 5 + 600
    arguments = sparse_prefill_at_load(shape.case, draw, Load(rows, tokens)).arguments
    return arguments, lambda: attention_prefill.run(launch, shape.case, *arguments, tile=tile)


def everything(launch: Any, names: list[str]) -> list[tuple[str, Tile]]:
    return [(name, tile) for name in names for tile in tiles(SHAPES[name].case, launch.capability)]


def warm(launch: Any, names: list[str], share: int, of: int) -> None:
    """Compile one of `of` shares of the candidates, by running each at two rows."""
    for name, tile in everything(launch, names)[share::of]:
        try:
            call(launch, SHAPES[name], tile, 2)[1]()
            torch.cuda.synchronize()
        except Exception as error:
            print(name, tile, str(error)[:150])


def error_of(shape: Shape, arguments: tuple[Any, ...], out_THD: torch.Tensor) -> float:
    """Largest relative error of a few rows, by norm."""
    rows = torch.linspace(0, shape.rows - 1, CHECKED_ROWS, device="cuda").long()
    q, positions, latents, latent_rows, sink, entries, table, sequence, selected = arguments
    few = (
        q[rows], positions[rows], latents, None if latent_rows is None else latent_rows[rows],
        sink, entries, table, sequence, None if selected is None else selected[rows],
    )  # fmt: skip
    expected = reference.sparse_prefill(shape.case, *few).float()
    off = (out_THD[rows].float() - expected).flatten(1).norm(dim=1)
    return float((off / expected.flatten(1).norm(dim=1)).max())


def poison(shape: Shape) -> None:
    """NaN in the memory that the next result is likely to take."""
    torch.full((shape.rows, shape.case.heads, shape.case.width), torch.nan, device="cuda",
               dtype=torch.bfloat16)  # fmt: skip


def flops_of(shape: Shape) -> float:
    case = shape.case
    entries = shape.tokens // case.ratio if case.ratio else 0
    keys = min(case.window, shape.tokens) + (min(case.topk, entries) if case.topk else entries)
    return 2.0 * shape.rows * case.heads * keys * (case.key_width + case.width)


def measure(launch: Any, name: str, tile: Tile) -> dict[str, Any]:
    shape = SHAPES[name]
    record: dict[str, Any] = {"shape": name, **asdict(tile)}
    try:
        arguments, timed = call(launch, shape, tile, shape.rows)
        poison(shape)
        out = timed()
        record["error"] = error_of(shape, arguments, out)
        ms = triton.testing.do_bench(timed, warmup=8, rep=40, return_mode="median")
        record["ms"] = ms
        record["tflops"] = flops_of(shape) / ms / 1e9
    except Exception as error:
        record["failed"] = f"{type(error).__name__}: {str(error)[:160]}"
    return record


def line(record: dict[str, Any]) -> str:
    tile = " ".join(f"{key}={record[key]}" for key in Tile.__dataclass_fields__)
    if "failed" in record:
        return f"{record['shape']:10} failed {record['failed']} | {tile}"
    return (
        f"{record['shape']:10} {record['ms']:8.3f} ms {record['tflops']:6.0f} TFLOP/s"
        f" error {record['error']:.1e} | {tile}"
    )


def measure_from(launch: Any, names: list[str], first: int, path: Path) -> int:
    """Measure the candidates from number `first` on; a line of `path` before and after each."""
    for number, (name, tile) in list(enumerate(everything(launch, names)))[first:]:
        with path.open("a") as file:
            file.write(json.dumps({"number": number, "shape": name, **asdict(tile)}) + "\n")
        record = measure(launch, name, tile)
        print(line(record), flush=True)
        with path.open("a") as file:
            file.write(json.dumps({"number": number, **record}) + "\n")
        if "CUDA" in record.get("failed", "") or "llegal" in record.get("failed", ""):
            return 3  # nothing works in this process any more
        torch.cuda.empty_cache()
    return 0


def measured(options: argparse.Namespace, command: list[str], until: float) -> None:
    """Measure in a process that is started anew behind a candidate that broke it or hangs."""
    path = options.out / f"prefill-{options.portable or 'native'}.jsonl"
    path.unlink(missing_ok=True)
    first = 0
    while time.monotonic() < until:
        child = subprocess.Popen([*command, "--from", str(first)], cwd=ROOT)
        grown = time.monotonic()
        size = 0
        while child.poll() is None and time.monotonic() < min(until, grown + STALLED_S):
            time.sleep(0.2)
            now = path.stat().st_size if path.exists() else 0
            if now != size:
                size, grown = now, time.monotonic()
        if child.poll() is None:
            child.kill()
        if child.wait() == 0:
            return
        if not path.exists():
            print("no candidate could be started", flush=True)
            return
        last = json.loads(path.read_text().splitlines()[-1])
        print(f"candidate {last['number']} broke or hung: {last}", flush=True)
        first = last["number"] + 1
    print("the time is spent")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--as", dest="portable", default="", choices=("", "sm_80", "sm_89"))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--warm", default="", help="share/shares: compile only")
    parser.add_argument("--from", dest="first", type=int, default=-1, help="measure only")
    options = parser.parse_args()
    names = options.shapes.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.warm:
        share, of = options.warm.split("/")
        warm(launcher(options.portable), names, int(share), int(of))
        return 0
    if options.first >= 0:
        path = options.out / f"prefill-{options.portable or 'native'}.jsonl"
        return measure_from(launcher(options.portable), names, options.first, path)
    began = time.monotonic()
    command = [sys.executable, __file__, *sys.argv[1:]]
    shares = [subprocess.Popen([*command, "--warm", f"{n}/{PROCESSES}"], cwd=ROOT) for n in range(PROCESSES)]
    for share in shares:
        try:
            share.wait(max(1.0, began + options.budget_s / 2 - time.monotonic()))
        except subprocess.TimeoutExpired:
            share.kill()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    measured(options, command, began + options.budget_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
