"""Half of V4-Flash at full width on one GPU of 139 GiB: long prompts, batches, positions, a disk.

    python lab/half_depth_device.py --out DIR [--only memory|disk] [more flags]

"memory": 21 layers in the released formats, 78 GB drawn on the GPU; a prompt of 1,040,000 tokens is
computed and 16 of its positions are held against the references; then prompts of 8k, 128k and 1M
tokens and batches of decode are timed. "disk": 12 layers, 45 GB, are written as a checkpoint of the
released format to --disk, loaded by the engine, checked at positions and timed; the files are
removed. In under nine minutes together, where the disk writes 1 GB/s. Further flags go to
`metainfer bench stages`, such as --kv-cache-dtype fp8. Run from the root of the repository.

DIR gets half-depth.json (the records of both), and what `bench stages` writes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "deepseek-v4-flash"
METAINFER = (sys.executable, "-m", "metainfer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results", type=Path)
    parser.add_argument("--only", choices=("memory", "disk"))
    parser.add_argument("--layers", default=21, type=int, help="drawn on the GPU")
    parser.add_argument("--disk-layers", default=12, type=int, help="written to the disk")
    parser.add_argument("--disk", default=tempfile.gettempdir(), type=Path)
    parser.add_argument("--input-lens", nargs="+", default=["8192", "131072", "1040000"])
    parser.add_argument("--decode-batches", nargs="+", default=["1", "8", "32"])
    parser.add_argument("--check-positions", default="16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=MODEL, help="another config, to try the script")
    parser.add_argument("--budget-s", default="240", help="no turn begins so long after the check")
    options, more = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {}
    if options.only != "disk":
        made["memory"] = in_memory(options, more)
    if options.only != "memory":
        made["disk"] = on_disk(options, more)
    path = options.out / "half-depth.json"
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    for name, part in made.items():
        print("\n".join(told(name, part)))
    print(f"wrote {path}")
    return 0 if all(part["code"] == 0 for part in made.values()) else 1


def in_memory(options: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """Layers whose weights are drawn on the GPU."""
    dummy = ["--load-format", "dummy", "--layers", str(options.layers)]
    lens = [str(length) for length in options.input_lens]
    return staged(options, "half-depth-memory", options.model, [*dummy, *more], lens)


def on_disk(options: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """Layers that go through files of the released format; seconds and bytes of both ways."""
    directory = options.disk / f"metainfer-{options.disk_layers}-layers"
    began_s = time.perf_counter()
    try:
        subprocess.run(
            [*METAINFER, "weights", "synth", str(directory), "--config", options.model,
             "--layers", str(options.disk_layers)],
            check=True,
        )  # fmt: skip
        written_s = time.perf_counter() - began_s
        nbytes = sum(file.stat().st_size for file in directory.iterdir())
        lens = [str(options.input_lens[0])]
        made = staged(options, "half-depth-disk", str(directory), more, lens)
        return {**made, "bytes": nbytes, "written_s": written_s}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def staged(options: argparse.Namespace, name: str, model: str, more: list[str], lens: list[str]) -> dict[str, Any]:
    """The record of one setting, and how long all of it took."""
    began_s = time.perf_counter()
    command = [
        *METAINFER, "bench", "stages", model, "--device", options.device, "--settings", "tuned",
        "--rounds", "1", "--input-lens", *lens, "--longest-warm-up", "16384",
        "--check-positions", options.check_positions, "--decode-batches", *options.decode_batches,
        "--decode-context", lens[0], "--decode-len", "33", "--max-num-batched-tokens", "8192",
        "--num-prompts", "0", *graph_sizes(options), "--budget", options.budget_s, "--save-result", "--result-dir",
        str(options.out), "--result-filename", f"{name}.json", *more,
    ]  # fmt: skip
    done = subprocess.run(command, check=False)
    path = options.out / f"{name}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    took_s = time.perf_counter() - began_s
    return {"code": done.returncode, "seconds": took_s, "record": record}


def graph_sizes(options: argparse.Namespace) -> list[str]:
    """Graphs of the batches that are timed alone: start-up captures few."""
    if options.device != "cuda" or len(options.decode_batches) < 2:
        return []
    return ["--cuda-graph-sizes", *options.decode_batches]


def told(name: str, part: dict[str, Any]) -> list[str]:
    """What is to be read first."""
    lines = [f"== {name}: exit code {part['code']}, {part['seconds']:.0f} s"]
    if "written_s" in part:
        rate = part["bytes"] / part["written_s"] / 1e9
        lines.append(f"{part['bytes'] / 1e9:.1f} GB written in {part['written_s']:.1f} s, {rate:.2f} GB/s")
    if part["record"] is None:
        return lines
    (side,) = part["record"]["sides"].values()
    receipt, peaks = side["receipt"], side["peaks"]
    plan = {key: value["value"] for key, value in receipt["plan"].items()}
    ledger = ", ".join(f"{key.removesuffix('_bytes')} {plan[key] / 1e9:.2f}" for key in plan if key.endswith("_bytes"))
    peak = (peaks.get("device_peak_bytes") or peaks["peak_bytes"]) / 1e9
    lines += [
        f"loaded, checked and warm after {receipt['load_s']:.1f} s; GB planned: {ledger}; peak {peak:.2f}",
        f"longest context alone: {receipt['longest_context']:,}; cached tokens"
        f" {side['tokens']['cached_tokens']} of {side['tokens']['prompt_tokens']:,}",
    ]
    first = None
    for work in part["record"]["works"]:
        found = work["sides"].get("tuned")
        if found is None:
            lines.append(f"{work['name']}: {side['missing'].get(work['name'], 'no time')}")
        elif work["do"] == "prefill":
            first = first or found["tokens_per_s"]
            lines.append(
                f"input {work['prompt_tokens']:,}: {found['tokens_per_s']:,.0f} tok/s,"
                f" {found['tokens_per_s'] / first:.0%} of the first, {found['seconds'][0]:.2f} s"
            )
        else:
            lines.append(f"decode, batch {work['batch']}: {found['tpot_s'] * 1e3:.2f} ms a token")
    return [*lines, *checked(receipt["positions"])]


def checked(found: dict[str, Any] | None) -> list[str]:
    """Largest error of each operation at the sampled positions."""
    if found is None:
        return []
    lines = [
        f"{len(found['positions'])} positions of {found['tokens']:,} tokens in"
        f" {found['seconds']:.1f} s: {found['checks'] - len(found['wrong'])} of {found['checks']}"
        " results agree with the references"
    ]
    for op, of in found["ops"].items():
        lines.append(
            f"  {op}: {of['checks']} checks, largest error {of['error']:.1e} of"
            f" {of['tolerance']:.0e} (layer {of['layer']}, position {of['position']:,})"
        )
    lines += [f"  WRONG {one}" for one in found["wrong"][:8]]
    return lines


if __name__ == "__main__":
    sys.exit(main())
