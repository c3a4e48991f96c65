"""Tiles and splits for sparse decode: which is right, and how fast, at the shapes of the models.

    python lab/kernels/decode_sweep.py --out DIR [--as sm_89] [--shapes csa64-v4,...] [--budget-s 55]

Candidates are compiled by processes side by side first. Each is then checked against the reference
with poisoned memory, run from a CUDA graph (natively), and timed over inputs that do not fit in the
cache. One line per shape and candidate: time, share of the floor (bytes of the listed rows, queries
and results at the rate of a copy; operations at the rate of a product). DIR/decode-*.jsonl has all of
them; a candidate that breaks its process is left behind. Run from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from metainfer.kernels.compare import Poisoned  # noqa: E402
from metainfer.kernels.inputs.attention import sparse_decode_at_load  # noqa: E402
from metainfer.kernels.inputs.base import Draw  # noqa: E402
from metainfer.kernels.reference import attention as reference  # noqa: E402
from metainfer.kernels.timing import Stopwatch  # noqa: E402
from metainfer.kernels.triton import attention_decode  # noqa: E402
from metainfer.kernels.triton.attention_decode import Tile, splits_of, tile_of  # noqa: E402
from metainfer.kernels.triton.launch import JitLauncher  # noqa: E402
from metainfer.kernels.triton.portable import PtxLauncher  # noqa: E402
from metainfer.ops.attention import SPARSE_DECODE, AttentionCase  # noqa: E402
from metainfer.ops.base import Load  # noqa: E402

PROCESSES = min(16, os.cpu_count() or 1)
INPUTS = 4
BYTES_PER_S = 4.3e12
FLOPS_PER_S = {"": 780e12, "sm_80": 400e12, "sm_89": 400e12}
TIMED_S = 0.03


@dataclass(frozen=True)
class Shape:
    case: AttentionCase
    rows: int
    tokens: int = 32768


_V4 = AttentionCase(64, 512, 128, ratio=4, topk=512)
_MLA = AttentionCase(64, 512, 0, 1, 2048, rope_extra=64, scale=0.0625, sink=False)
_CASES = {
    "csa-bf16": _V4,
    "csa-v4": replace(_V4, window_format="v4_fp8", entry_format="v4_fp8"),
    "csa-v41": replace(_V4, ratio=2, window_format="v41_fp8", entry_format="v41_fp4"),
    "glm-bf16": _MLA,
    "glm-fp8": replace(_MLA, entry_format="mla_fp8"),
}
SHAPES = {
    f"{name}-{heads}x{rows}": Shape(replace(case, heads=heads), rows)
    for rows in (64, 1)
    for heads in (64, 8)
    for name, case in _CASES.items()
}
SHAPES["hca-v4-64x1"] = Shape(replace(_CASES["csa-v4"], ratio=128, topk=0), 1, 1048576)
SHAPES["csa-v4-32x64"] = Shape(replace(_CASES["csa-v4"], heads=32), 64)
SHAPES["glm-fp8-64x256"] = Shape(_CASES["glm-fp8"], 256)


@dataclass(frozen=True)
class Candidate:
    tile: Tile
    splits: int | None = None


def candidates(shape: Shape, capability: tuple[int, int], places: int) -> list[Candidate]:
    """The table's own first."""
    case = shape.case
    coded = case.entry_format != "dense"
    tiles = [tile_of(case, capability)]
    if case.heads <= 16 or shape.rows == 1:
        tiles += [
            Tile("mma", 16, 32, 4, resident=2),
            Tile("mma", 16, 32, 8, resident=2, registers=128),
            Tile("mma", 16, 16, 4, resident=2),
            Tile("mma", 16, 32, 4, held=256),
        ]
        if not coded:
            tiles += [Tile("mma", 16, 32, 4, resident=1, buffers=3 if case.rope_extra == 0 else 2)]
    if case.heads > 16 and shape.rows > 1:
        tiles += [
            Tile("mma", 32, 32, 8, held=256, warps_m=2),
            Tile("mma", 32, 32, 8, held=512, warps_m=2),
            Tile("mma", 32, 16, 8, held=256, warps_m=2),
        ]
        if capability == (9, 0):
            tiles += [Tile("wgmma", 64, 64, 8), Tile("mma", 32, 32, 8, warps_m=2)]
        if capability in ((8, 0), (9, 0)) and case.heads > 32:
            tiles += [Tile("mma", 64, 32, 8, warps_m=4)]
    found = [Candidate(tile) for tile in dict.fromkeys(tiles)]
    chosen = tiles[0]
    blocks = -(-case.heads // chosen.heads)
    listed = case.window + (case.topk or shape.tokens // case.ratio)
    count = -(-listed // chosen.keys)
    best = splits_of(shape.rows * blocks, count, chosen.keys, places * chosen.resident, shape.rows * case.heads)
    for splits in {max(1, best // 2), min(count, best * 2), min(count, best + best // 2), 1} - {best}:
        if shape.rows > 1 or splits > 1:
            found.append(Candidate(chosen, splits))
    return found


def launcher(portable: str) -> Any:
    return PtxLauncher((int(portable[3]), int(portable[4]))) if portable else JitLauncher()


def arguments_of(shape: Shape, seed: int) -> tuple[Any, ...]:
    draw = Draw(seed, "cuda", in_place=True)
    return sparse_decode_at_load(shape.case, draw, Load(shape.rows, shape.tokens)).arguments


def everything(launch: Any, names: list[str]) -> list[tuple[str, Candidate]]:
    return [
        (name, candidate)
        for name in names
        for candidate in candidates(SHAPES[name], launch.capability, launch.multiprocessors)
    ]


def run(launch: Any, shape: Shape, arguments: tuple[Any, ...], candidate: Candidate) -> Any:
    return attention_decode.run(launch, shape.case, *arguments, tile=candidate.tile, splits=candidate.splits)


def warm(launch: Any, names: list[str], share: int, of: int) -> None:
    """Compile one of `of` shares of the candidates, by running each."""
    for name, candidate in everything(launch, names)[share::of]:
        shape = replace(SHAPES[name], tokens=min(SHAPES[name].tokens, 32768))
        try:
            run(launch, shape, arguments_of(shape, 0), candidate)
            torch.cuda.synchronize()
        except Exception as error:
            print(name, candidate, str(error)[:150])


def error_of(expected: Any, actual: Any) -> float:
    """Largest relative error of a row, by norm."""
    ours, theirs = (one[0] if isinstance(one, tuple) else one for one in (actual, expected))
    off = (ours.float() - theirs.float()).flatten(1).norm(dim=1)
    return float((off / theirs.float().flatten(1).norm(dim=1)).max())


def from_graph(launch: Any, shape: Shape, arguments: tuple[Any, ...], candidate: Candidate) -> Any:
    """The result of a graph that was recorded once and is run twice."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(launch, shape, arguments, candidate)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return result


def floor_s(shape: Shape, portable: str) -> float:
    cost = SPARSE_DECODE.cost(shape.case, Load(shape.rows, shape.tokens))
    return max(cost.bytes / BYTES_PER_S, cost.flops / FLOPS_PER_S[portable])


def measure(
    launch: Any, name: str, candidate: Candidate, inputs: list[Any], expected: Any, portable: str
) -> dict[str, Any]:
    shape = SHAPES[name]
    record: dict[str, Any] = {"shape": name, "splits": candidate.splits, **asdict(candidate.tile)}
    try:
        with Poisoned():
            record["error"] = error_of(expected, run(launch, shape, inputs[0], candidate))
        if not portable:
            graphed = from_graph(launch, shape, inputs[0], candidate)
            record["graph_error"] = error_of(expected, graphed)
        watch = Stopwatch("cuda")
        calls = [lambda one=one: run(launch, shape, one, candidate) for one in inputs]
        seconds = watch.median_s(calls * 2, TIMED_S)
        record["us"] = seconds * 1e6
        record["of_floor"] = floor_s(shape, portable) / seconds
        record["bytes_us"] = SPARSE_DECODE.cost(
            shape.case, Load(shape.rows, shape.tokens)
        ).bytes / BYTES_PER_S * 1e6  # fmt: skip
    except Exception as error:
        record["failed"] = f"{type(error).__name__}: {str(error)[:160]}"
    return record


def line(record: dict[str, Any]) -> str:
    tile = " ".join(f"{key}={record[key]}" for key in ("splits", *Tile.__dataclass_fields__) if record[key])
    if "failed" in record:
        return f"{record['shape']:16} failed {record['failed']} | {tile}"
    return (
        f"{record['shape']:16} {record['us']:8.1f} us {record['of_floor']:5.0%}"
        f" (bytes {record['bytes_us']:.1f} us) error {record['error']:.1e}"
        f" graph {record.get('graph_error', 0.0):.1e} | {tile}"
    )


def measure_from(launch: Any, names: list[str], first: int, path: Path, portable: str) -> int:
    """Measure the candidates from number `first` on; a line of `path` before and after each."""
    inputs: list[Any] = []
    expected: Any = None
    of = ""
    for number, (name, candidate) in list(enumerate(everything(launch, names)))[first:]:
        if name != of:
            inputs.clear()
            torch.cuda.empty_cache()
            inputs += [arguments_of(SHAPES[name], seed) for seed in range(INPUTS)]
            expected = reference.sparse_decode(SHAPES[name].case, *inputs[0])
            of = name
        with path.open("a") as file:
            file.write(json.dumps({"number": number, "shape": name}) + "\n")
        record = measure(launch, name, candidate, inputs, expected, portable)
        print(line(record), flush=True)
        with path.open("a") as file:
            file.write(json.dumps({"number": number, **record}) + "\n")
        if "CUDA" in record.get("failed", "") or "llegal" in record.get("failed", ""):
            return 3  # nothing works in this process any more
    return 0


def measured(options: argparse.Namespace, command: list[str], until: float) -> None:
    """Measure in a process that is started anew behind a candidate that broke it."""
    path = options.out / f"decode-{options.portable or 'native'}.jsonl"
    path.unlink(missing_ok=True)
    first = 0
    while time.monotonic() < until:
        child = subprocess.Popen([*command, "--from", str(first)], cwd=ROOT)
        try:
            code = child.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            print("the time is spent")
            return
        if code == 0 or not path.exists():
            return
        first = json.loads(path.read_text().splitlines()[-1])["number"] + 1
        print(f"candidate {first - 1} broke its process", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--as", dest="portable", default="", choices=("", "sm_80", "sm_89"))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--budget-s", type=float, default=110.0)
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
        path = options.out / f"decode-{options.portable or 'native'}.jsonl"
        launch = launcher(options.portable)
        return measure_from(launch, names, options.first, path, options.portable)
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
