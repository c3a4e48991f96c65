"""The three stages of four V4-Flash layers of full width on one GPU, in under 200 s.

    python lab/stages_device.py --out DIR [--against transformers] [--budget-s 150] [more flags]

With transformers beside them four engines do not fit 139 GiB: ask for fewer, as in
`--settings tuned --against transformers`. The first run of a machine compiles kernels besides.

Layers are sliding, CSA, HCA, CSA with a vocabulary of 32,768 and no hash routing, as in the
measurement of transformers that the aims refer to; weights are drawn on the GPU. Prompts of 1k, 4k,
8k and 32k tokens, decode at batches of 1 and 8. Further flags go to `metainfer bench stages`. Run
from the root of the repository; DIR gets bench-stages.json and .svg.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

OVERRIDES = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 0,
    "vocab_size": 32768,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results")
    parser.add_argument("--budget-s", default="150", help="no turn begins after so many seconds")
    parser.add_argument("--rounds", default="3")
    options, more = parser.parse_known_args()
    command = [
        sys.executable, "-m", "metainfer", "bench", "stages", "deepseek-v4-flash",
        "--load-format", "dummy", "--hf-overrides", json.dumps(OVERRIDES), "--device", "cuda",
        "--input-lens", "1024", "4096", "8192", "32768", "--decode-batches", "1", "8",
        "--decode-context", "2048", "--decode-len", "33", "--max-num-batched-tokens", "8192",
        "--num-prompts", "12", "--request-rate", "4", "--traffic-lens", "256", "8192",
        "--traffic-output-len", "32", "--rounds", options.rounds, "--budget", options.budget_s,
        "--save-result", "--result-dir", options.out, *more,
    ]  # fmt: skip
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
