"""Compiles what `bench ops` will run, by running each side once: several processes, each with its
share, fill Triton's cache on disk in the time of one.

    python lab/kernels/warm.py --shard 0/8 deepseek-v4-flash --as sm_89

After --shard come the arguments of `metainfer bench ops`.
"""

from __future__ import annotations

import sys
import time

from metainfer.bench.ops import measure
from metainfer.bench.ops_run import sides
from metainfer.bench.ops_works import works_of
from metainfer.cli.bench_ops import VERB
from metainfer.cli.verb import parse
from metainfer.kernels.platform import platform
from metainfer.kernels.timing import Stopwatch
from metainfer.kernels.verify import rates_of


def main() -> int:
    place, count = map(int, sys.argv[2].split("/"))
    load, _ = parse(VERB, [*sys.argv[3:], "--rounds", "1", "--no-generic"], {})
    here = platform(load.device)
    older = platform(load.device, load.code_for) if load.code_for else None
    works = works_of(load, here.device)[place::count]
    began_s = time.perf_counter()
    if older is not None and place == 0:
        rates_of(older)
    failed = []
    for work in works:
        result = measure(work, sides(work, load, here, older, {}), Stopwatch(here.device), 1)
        failed += [(work.op, name, why) for name, why in result.missing.items()]
    for op, name, why in failed:
        print(f"{op} on {name}: {why}")
    print(f"{len(works)} operations in {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
