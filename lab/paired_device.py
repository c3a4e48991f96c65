"""Pairs of settings on one GPU: shared and routed experts side by side; what formats cost.

    python lab/paired_device.py --out DIR [--only paired|quality] [--a SETTING --b SETTING]

"paired": the layers of `lab/stages_device.py` (four of V4-Flash at full width, drawn on the GPU),
35 pairs of turns of the shared expert on a stream of its own against one stream: a prompt of 8,192
tokens, and decoding at batches of 1, 8 and 64; about 110 s. "quality": what the shipped model
predicts under one setting against another: the kernels against torch's compositions in fp32, rows
rounded to fp8 groups against plain ones, caches in fp8 against bf16; about 60 s each where its
kernels must be compiled. Further flags go to `metainfer bench paired`.

Run from the root of the repository; DIR gets the records that belong in docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

OVERRIDES = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 0,
    "vocab_size": 32768,
}
METAINFER = (sys.executable, "-m", "metainfer")

PLAIN = "--kv-cache-dtype=bfloat16"
"""Whatever an earlier verdict on this machine made of caches."""

QUALITY = {
    "kernels": (f"generic,--dtype=float32,{PLAIN}", f"tuned,--activations=plain,{PLAIN}"),
    "activations": (f"tuned,--activations=plain,{PLAIN}", f"tuned,--activations=fp8,{PLAIN}"),
    "caches": (f"tuned,{PLAIN}", "tuned,--kv-cache-dtype=fp8"),
}
"""Name of each comparison: what counts as right, and what is judged."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results", type=Path)
    parser.add_argument("--only", choices=("paired", "quality"))
    parser.add_argument("--a", default="tuned,--shared-expert-stream=off")
    parser.add_argument("--b", default="tuned")
    parser.add_argument("--pairs", default="35")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget-s", default="100", help="no turn begins after so many seconds")
    parser.add_argument("--quality", nargs="+", default=list(QUALITY), choices=list(QUALITY))
    options, more = parser.parse_known_args()
    codes = []
    if options.only != "quality":
        codes.append(paired(options, more))
    if options.only != "paired":
        codes += [quality(options, name) for name in options.quality]
    return max(codes)


def paired(options: argparse.Namespace, more: list[str]) -> int:
    command = [
        *METAINFER, "bench", "paired", "deepseek-v4-flash", "--load-format", "dummy",
        "--hf-overrides", json.dumps(OVERRIDES), "--device", options.device, "--a", options.a,
        "--b", options.b, "--pairs", options.pairs, "--input-lens", "8192", "--decode-batches", "1",
        "8", "64", "--decode-context", "512", "--decode-len", "33", "--max-num-batched-tokens",
        "8192", "--cuda-graph-sizes", "1", "8", "64", "--budget", options.budget_s, "--save-result",
        "--result-dir", str(options.out), *more,
    ]  # fmt: skip
    return subprocess.run(command, check=False).returncode


def quality(options: argparse.Namespace, name: str) -> int:
    """A verdict that does not pass is a result too; it is told by the exit code."""
    right, judged = QUALITY[name]
    command = [
        *METAINFER, "bench", "quality", "--device", options.device, "--a", right, "--b", judged,
        "--save-result", "--result-dir", str(options.out),
        "--result-filename", f"quality-{name}.json",
    ]  # fmt: skip
    print(f"== {name}: {judged} against {right}", flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
