"""Ways to run hyper-connections and compressors: which is right, and how fast, beside its floor.

    python lab/kernels/hc_sweep.py --out DIR [--as sm_89] [--only mix,expand] [--budget-s 90]

All ways are compiled by processes side by side first. Each is then checked against the reference
with poisoned memory, and timed in series over inputs that together do not fit a cache. One line a
way; DIR/hc-*.json has all of them. Run from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from metainfer.kernels.compare import Poisoned, compare  # noqa: E402
from metainfer.kernels.inputs.base import Call, Draw  # noqa: E402
from metainfer.kernels.inputs.load import at_load  # noqa: E402
from metainfer.kernels.reference import BACKENDS as REFERENCES  # noqa: E402
from metainfer.kernels.timing import Stopwatch  # noqa: E402
from metainfer.kernels.triton import compress, hc, hc_rows  # noqa: E402
from metainfer.kernels.triton.launch import JitLauncher, Launcher  # noqa: E402
from metainfer.kernels.triton.portable import PtxLauncher  # noqa: E402
from metainfer.ops.base import Load  # noqa: E402
from metainfer.ops.catalogue import OPS  # noqa: E402
from metainfer.ops.hc import HyperCase  # noqa: E402

PROCESSES = min(16, os.cpu_count() or 1)
COPY_BYTES_PER_S = 4.3e12  # measured on an H200; what floors are counted with
COLD_BYTES = 150e6  # of the inputs of one series
MOST_CALLS = 64
MOST_S = 25.0  # for one way, the start of a process included
REFERENCE = {backend.op: backend.run for backend in REFERENCES}
V4 = OPS["hc.mix"].cases["deepseek-v4-flash"][0]
V41 = OPS["hc.mix_shifted"].cases["deepseek-v4.1-flash"][0]


@dataclass(frozen=True)
class Way:
    """`run(launch, case, *arguments)`, the first argument what `prepare` returned if there are
    weights."""

    op: str
    case: Any
    rows: int
    name: str
    run: Callable[..., Any]
    prepare: Callable[..., Any] | None = None

    @property
    def label(self) -> str:
        return f"{self.op} {self.rows} {self.name}"


def few_rows() -> list[Way]:
    """Decode: slices of the first step."""
    ways = []
    for rows in (1, 16, 64):
        for slices, step in ((128, 128), (64, 256), (64, 128), (256, 64)):
            tiles = hc.tiles_of(rows, 4 * 4096, step, slices)
            run = partial(hc.mix, tiles=tiles)
            ways.append(Way("hc.mix_norm", V4, rows, f"two launches {short(tiles)}", run, hc.prepare_mix))
        ways.append(Way("hc.mix", V4, rows, "table", hc.mix, hc.prepare_mix))
        for slices, step in ((160, 32), (80, 64), (80, 32), (40, 64)):
            tiles = hc.tiles_of(rows, 5120, step, slices, 4)
            run = partial(hc.mix_shifted, tiles=tiles)
            ways.append(Way("hc.mix_shifted", V41, rows, short(tiles), run, hc.prepare_mix))
    return ways


def many_rows() -> list[Way]:
    """Prefill: two launches, and two for chunks that a cache holds."""
    mix = partial(Way, "hc.mix", V4)
    tiles = hc.tiles_of(8192, 4 * 4096, 64, 128)
    ways = [
        mix(512, "table", hc.mix, hc.prepare_mix),
        mix(8192, "table", hc.mix, hc.prepare_mix),
        mix(8192, f"two launches {short(tiles)}", partial(hc.mix, tiles=tiles), hc.prepare_mix),
        mix(8192, "chunks of 768", partial(in_chunks, 768), hc.prepare_mix),
    ]
    for height, warps, stages in ((64, 8, 4), (64, 4, 3), (128, 8, 3), (128, 4, 3)):
        tall = replace(tiles, rows=height, warps=warps, stages=stages)
        run = partial(hc.mix, tiles=tall)
        ways.append(mix(8192, f"two launches {short(tall)}", run, hc.prepare_mix))
    ways.append(Way("hc.mix_norm", V4, 8192, "table", hc.mix, hc.prepare_mix))
    for step, stages, warps in ((32, 3, 4), (32, 2, 4), (32, 4, 4), (32, 3, 8), (16, 4, 4)):
        tiles = replace(hc.tiles_of(8192, 5120, step, 128, 4), stages=stages, warps=warps)
        run = partial(hc.mix_shifted, tiles=tiles)
        ways.append(Way("hc.mix_shifted", V41, 8192, short(tiles), run, hc.prepare_mix))
    return ways


def in_chunks(
    chunk: int, launch: Launcher, case: HyperCase, weights: hc.Mixes, streams_TSD: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    parts = [hc.mix(launch, case, weights, part) for part in streams_TSD.split(chunk)]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def expanding() -> list[Way]:
    ways = []
    for rows in (1, 64, 8192):
        for channels, warps in ((1024, 4), (512, 2), (1024, 2), (2048, 4), (2048, 8), (4096, 8)):
            run = partial(hc_rows.expand, channels=channels, warps=warps)
            ways.append(Way("hc.expand", V4, rows, f"{channels} channels, {warps} warps", run))
        ways.append(Way("hc.expand", V41, rows, "V4.1", hc_rows.expand))
        ways.append(Way("hc.collapse", V41, rows, "table", hc_rows.collapse, hc_rows.prepare_collapse))
        ways.append(Way("hc.head", V4, rows, "table", hc.head, hc.prepare_head))
    return ways


def compressing() -> list[Way]:
    ways = []
    runs = {"attention.compress": (8192,), "attention.compress_decode": (1, 64)}
    for op, counts in runs.items():
        run = compress.compress if op == "attention.compress" else compress.compress_decode
        for model in ("deepseek-v4-flash", "deepseek-v4.1-flash"):
            for case in OPS[op].cases[model]:
                name = f"ratio {case.ratio} width {case.width}"
                ways += [Way(op, case, rows, name, run) for rows in counts]
    return ways


GROUPS = {"mix": few_rows, "prefill": many_rows, "expand": expanding, "compress": compressing}


def short(tiles: hc.Tiles) -> str:
    return f"{tiles.rows}x{tiles.channels}, {tiles.splits} slices, {tiles.warps} warps, {tiles.stages} stages"


def launcher(portable: str) -> Launcher:
    return PtxLauncher((int(portable[3]), int(portable[4]))) if portable else JitLauncher()


def series(launch: Launcher, way: Way, calls: list[Call]) -> list[Callable[[], Any]]:
    found = []
    for call in calls:
        arguments = call.arguments
        if way.prepare is not None:
            arguments = (way.prepare(way.case, *call.weights), *arguments)
        found.append(partial(way.run, launch, way.case, *arguments))
    return found


def inputs(way: Way, count: int) -> list[Call]:
    load = Load(way.rows, way.rows)
    return [at_load(way.op, way.case, load, Draw(n, "cuda", in_place=True)) for n in range(count)]


def warm(launch: Launcher, ways: list[Way]) -> None:
    for way in ways:
        try:
            series(launch, way, inputs(way, 1))[0]()
            torch.cuda.synchronize()
        except Exception as error:
            print(way.label, str(error)[:150])


def error_of(launch: Launcher, way: Way) -> float:
    """Largest error relative to the largest number; raises where it is more than the op allows."""
    call, again = inputs(way, 1)[0], inputs(way, 1)[0]
    weights = (call.weights,) if way.prepare is not None else ()
    expected = REFERENCE[way.op](way.case, *weights, *call.arguments)
    with Poisoned():
        actual = series(launch, way, [again])[0]()
    both = [result if isinstance(result, tuple) else (result,) for result in (actual, expected)]
    found = compare(way.op, way.case, call, *both)
    if found.problem:
        raise ValueError(found.problem)
    return found.error


def measure(launch: Launcher, way: Way) -> dict[str, Any]:
    record: dict[str, Any] = {"op": way.op, "rows": way.rows, "way": way.name}
    moved = OPS[way.op].cost(way.case, Load(way.rows, way.rows)).bytes
    record["floor_us"] = moved / COPY_BYTES_PER_S * 1e6
    try:
        record["error"] = error_of(launch, way)
        torch.cuda.empty_cache()
        count = int(max(1, min(MOST_CALLS, COLD_BYTES // moved)))
        calls = series(launch, way, inputs(way, count))
        record["us"] = Stopwatch("cuda").median_s(calls, budget_s=0.05) * 1e6
    except Exception as error:
        record["failed"] = f"{type(error).__name__}: {str(error)[:160]}"
    return record


def line(record: dict[str, Any]) -> str:
    start = f"{record['op']:25} {record['rows']:5}"
    if "failed" in record:
        return f"{start} failed: {record['failed']} | {record['way']}"
    return (
        f"{start} {record['us']:8.2f} us, floor {record['floor_us']:7.2f}, error {record['error']:.1e}"
        f" | {record['way']}"
    )


def measured(ways: list[Way], command: list[str], until: float) -> list[dict[str, Any]]:
    """Every way in turn, by a process that is replaced where a way ends or holds it."""
    records: list[dict[str, Any]] = []
    while len(records) < len(ways) and time.monotonic() < until:
        child = subprocess.Popen([*command, "--from", str(len(records))], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=hand_over, args=(child.stdout, lines), daemon=True).start()
        while len(records) < len(ways):
            try:
                said = lines.get(timeout=max(0.1, min(MOST_S, until - time.monotonic())))
            except queue.Empty:
                said = ""
            if not said:
                break
            if said.startswith("{"):
                records.append(json.loads(said))
                print(line(records[-1]), flush=True)
        child.kill()
        child.wait()
        if len(records) < len(ways):
            way = ways[len(records)]
            records.append({"op": way.op, "rows": way.rows, "way": way.name, "failed": "no result in time"})
            print(line(records[-1]), flush=True)
    return records


def hand_over(source: Any, lines: queue.Queue[str]) -> None:
    for said in source:
        lines.put(said)
    lines.put("")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--as", dest="portable", default="", choices=("", "sm_80", "sm_89"))
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--warm", default="", help="share/shares: compile only")
    parser.add_argument("--from", dest="first", type=int, default=-1, help="measure only")
    options = parser.parse_args()
    ways = [way for group in options.only.split(",") for way in GROUPS[group]()]
    if options.warm:
        share, of = map(int, options.warm.split("/"))
        warm(launcher(options.portable), ways[share::of])
        return 0
    if options.first >= 0:
        launch = launcher(options.portable)
        for way in ways[options.first :]:
            print(json.dumps(measure(launch, way)), flush=True)
        return 0
    began = time.monotonic()
    command = [sys.executable, __file__, *sys.argv[1:]]
    shares = [subprocess.Popen([*command, "--warm", f"{n}/{PROCESSES}"], cwd=ROOT) for n in range(PROCESSES)]
    for share in shares:
        try:
            share.wait(max(1.0, began + options.budget_s / 2 - time.monotonic()))
        except subprocess.TimeoutExpired:
            share.kill()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    records = measured(ways, command, began + options.budget_s)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"hc-{options.portable or 'native'}.json").write_text(json.dumps(records, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
