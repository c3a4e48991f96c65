"""All that a GPU has to show of the kernels, in one call with a time budget.

    python lab/kernels/device.py --out DIR [--budget-s 540] [--only tests,sanitizer,bench,verify]

Stages: the tests of a GPU natively and as the code of sm_89 and sm_80, compute-sanitizer on one
case of each kernel, `bench ops` natively and as sm_89, `verify`. Every stage is made of processes
of its own with a deadline, so that a crash or a hang loses nothing; logs, records and
DIR/device.json are written as stages end: one log for all processes of a stage that went well, one
for each that did not. Needs torch, Triton and pytest; run from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARDS = min(12, os.cpu_count() or 1)
MOST_LINES = 30  # of the tail of a log, or failures of a stage, that are printed
MOST_BENCH_LINES = 60
MOST_CHARACTERS = 11_900  # of the report
LINE = 180


@dataclass
class Stage:
    """Processes that run side by side, and how they ended.

    Attributes:
        commands: name -> arguments after the interpreter.
        most_s: deadline of all of them.
        tool: what runs the interpreter, such as compute-sanitizer with its flags.
        codes: name -> exit code; None where the deadline came first.
        ends: name -> the last lines of its log.
    """

    name: str
    commands: dict[str, list[str]]
    most_s: float
    tool: Sequence[str] = ()
    codes: dict[str, int | None] = field(default_factory=dict)
    ends: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--only", default="tests,sanitizer,bench,verify")
    parser.add_argument("--bench", default="", help="arguments of bench ops in place of one model's")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.budget_s
    stages = [
        stage
        for group, stage in all_stages(options.out, options.bench.split() or BENCH)
        if group in options.only.split(",")
    ]
    for place, stage in enumerate(stages):
        left_s = until - time.monotonic()
        if left_s > 5:
            # What a later stage needs at the very least is kept for it.
            run_stage(stage, min(stage.most_s, left_s - 5.0 * (len(stages) - place - 1)), options.out)
        write(options.out, stages)
    print(report(stages, options.out))
    return 0


BENCH = ["deepseek-v4-flash", "--part", "attention"]
BUDGET = "BUDGET"  # what is left of a stage's time when it starts, in seconds


def all_stages(out: Path, bench: list[str]) -> list[tuple[str, Stage]]:
    """(group, stage) in the order in which they run."""
    stages = [
        ("tests", Stage("tests", tests([]), 150)),
        ("tests", Stage("tests as sm_89", tests(["--as", "sm_89"]), 150)),
        ("tests", Stage("tests as sm_80", tests(["--as", "sm_80"]), 150)),
    ]
    sanitizer = find_sanitizer()
    if sanitizer:
        tool = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5"]
        stages += [("sanitizer", Stage("memcheck", tests(["--one-case"]), 200, tool))]
    bench = [*bench, "--as", "sm_89"]
    warm = {f"compile {n}": ["lab/kernels/warm.py", "--shard", f"{n}/{SHARDS}", *bench] for n in range(SHARDS)}
    stages += [("bench", Stage("compile", warm, 150))]
    command = ["-m", "metainfer", "bench", "ops", "--save-result", "--result-dir", str(out)]
    command += ["--budget", BUDGET, *bench]
    stages += [("bench", Stage("bench ops", {"bench ops": command}, 300))]
    command = ["-m", "metainfer", "verify", "deepseek-v4-flash", "--part", "attention"]
    command += ["--budget", BUDGET, "--workers", str(SHARDS), "--out", str(out / "verify.json")]
    stages += [("verify", Stage("verify", {"verify": command}, 300))]
    return stages


def tests(flags: list[str]) -> dict[str, list[str]]:
    command = ["-m", "pytest", "-q", "tests/gpu", "-p", "no:cacheprovider", "--tb=short"]
    # The settings of all tests need packages that these do not.
    command += ["--confcutdir", "tests/gpu", *flags]
    name = " ".join(["tests", *flags])
    return {f"{name} {n}": [*command, "--shard", f"{n}/{SHARDS}"] for n in range(SHARDS)}


def find_sanitizer() -> str | None:
    """compute-sanitizer, on the path or where toolkits put it."""
    for place in ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"):
        found = shutil.which(place)
        if found:
            return found
    return None


def run_stage(stage: Stage, most_s: float, out: Path) -> None:
    """Start all commands of a stage, wait until they end or the deadline comes, end those left."""
    began = time.monotonic()
    more = os.environ.get("PYTHONPATH", "")  # of peers that are not installed
    environment = {**os.environ, "PYTHONPATH": f".:{more}", "OMP_NUM_THREADS": "1"}
    if stage.tool:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # neighbours would hide overruns
    processes = {}
    for name, words in stage.commands.items():
        command = [f"{max(most_s - 20, 1):.0f}" if word == BUDGET else word for word in words]
        with log_of(out, name).open("wb") as log:
            processes[name] = subprocess.Popen(
                [*stage.tool, sys.executable, *command],
                stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
                start_new_session=True,
            )  # fmt: skip
    for name, process in processes.items():
        try:
            stage.codes[name] = process.wait(max(0.1, most_s - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            stage.codes[name] = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    stage.seconds = time.monotonic() - began
    gather_logs(stage, out)


def gather_logs(stage: Stage, out: Path) -> None:
    """Note how each log ends, and put those of processes that went well into one file."""
    few = MOST_LINES if len(stage.commands) == 1 else 1
    for name in stage.commands:
        stage.ends[name] = log_of(out, name).read_text(errors="replace").splitlines()[-few:]
    if len(stage.commands) == 1:
        return
    with log_of(out, stage.name).open("wb") as together:
        for name in stage.commands:
            if stage.codes[name] == 0:
                together.write(f"==== {name}\n".encode() + log_of(out, name).read_bytes())
                log_of(out, name).unlink()


def log_of(out: Path, name: str) -> Path:
    return out / (name.replace(" ", "_").replace("/", "-") + ".log")


def write(out: Path, stages: Sequence[Stage]) -> None:
    record: dict[str, Any] = {"stages": [asdict(stage) for stage in stages]}
    (out / "device.json").write_text(json.dumps(record, indent=1))


def report(stages: Sequence[Stage], out: Path) -> str:
    """A line for each stage, what failed in it, and the end of what single commands printed."""
    lines = []
    for stage in stages:
        ended = [str(code) if code is not None else "late" for code in stage.codes.values()]
        lines.append(f"== {stage.name}: {stage.seconds:.0f} s, exit {' '.join(ended) or 'not run'}")
        failed: dict[str, None] = {}
        for name, code in stage.codes.items():
            if name == "bench ops" and (out / "bench-ops.json").is_file():
                lines += bench_lines(json.loads((out / "bench-ops.json").read_text()))
                continue
            lines += stage.ends[name]
            if code != 0 and len(stage.codes) > 1:
                said = log_of(out, name).read_text(errors="replace").splitlines()
                failed |= dict.fromkeys(line for line in said if line.startswith(("FAILED", "ERROR", "E  ")))
        lines += list(failed)[:MOST_LINES]
    return "\n".join(line[:LINE] for line in lines)[:MOST_CHARACTERS]


def bench_lines(record: dict[str, Any]) -> list[str]:
    """Where a pass through the models loses most time against the floor, largest loss first."""
    rated, portable = record["rates"], record["portable"]
    lines = [f"rates {json.dumps(rated)}", f"as sm_89 {json.dumps(portable)}"]
    lines += [f"{len(record['operations'])} operations; us, of floor; sm_89 us, of its; torch us"]
    losses: dict[str, float] = {}
    for entry in record["operations"]:
        sides = dict(entry["sides"])
        torch_side, older = sides.pop("torch", None), sides.pop("sm_89", None)
        name = f"{entry['op']} {' '.join(str(v) for v in entry['case'].values() if v)}"
        line = f"{name[:80]:<80} {entry['rows']:>5} floor {entry['floor_s'] * 1e6:.4g}:"
        loss = 0.0
        for label, side in sides.items():
            line += f" {label} {side['median_s'] * 1e6:.4g} {side['of_floor']:.0%}"
        if sides:
            first = next(iter(sides.values()))
            loss = entry["times"] * (first["median_s"] - entry["floor_s"])
        if older:
            line += f"; {older['median_s'] * 1e6:.4g} {entry['portable_of_floor']:.0%}"
        if torch_side:
            line += f"; {torch_side['median_s'] * 1e6:.4g}"
        line += "".join(f"; {who}: {why[:60]}" for who, why in entry["missing"].items())
        losses[line] = max(losses.get(line, 0.0), loss)
    return lines + sorted(losses, key=lambda line: -losses[line])[:MOST_BENCH_LINES]


if __name__ == "__main__":
    sys.exit(main())
