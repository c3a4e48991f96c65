"""How time is shared between a long prompt and sequences that decode: what each share costs whom.

    python lab/pace_study.py [--device cuda --prompt 131072 --rounds 3] [--out FILE]

Sequences decode; behind their first tokens a long prompt comes. For each `--decode-share` it is
timed how long the prompt takes and how far apart the tokens of the others come meanwhile. Shares
take turns in one process, over one set of weights: on a GPU V4-Flash's first layers, drawn there; on
a CPU the shipped model. It decides the default in `metainfer/plan/pace.py`. Run from the root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from metainfer.bench.traffic import draw_ids
from metainfer.core.events import FinishEvent, TokenEvent
from metainfer.llm.engine import Engine, load_model
from metainfer.llm.request import Request, SamplingParams
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import pebble_dir

LAYERS = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "num_hash_layers": 0}
SHARES = (0.0, 0.1, 0.25, 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--decoding", default=8, type=int, help="sequences that decode")
    parser.add_argument("--prompt", default=2048, type=int, help="tokens of the long prompt")
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--chunk", type=int, help="tokens of a step; the plan's if not given")
    parser.add_argument("--longest-prefill", type=float, help="seconds of a step with a prompt")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = EngineSettings(
        device=options.device,
        max_model_len=options.prompt + 64,
        max_num_seqs=options.decoding + 1,
        max_num_batched_tokens=options.chunk,
        longest_prefill_s=options.longest_prefill,
    )
    source: str | Path = pebble_dir()
    if options.device.startswith("cuda"):
        source = "deepseek-v4-flash"
        settings = replace(settings, load_format="dummy", hf_overrides=LAYERS)
    loaded = load_model(source, settings)
    found: dict[float, list[tuple[float, float, float]]] = {share: [] for share in SHARES}
    warmed = False
    for number in range(options.rounds):
        for share in SHARES if number % 2 == 0 else reversed(SHARES):
            plan = replace(loaded.plan, decode_share=replace(loaded.plan.decode_share, value=share))
            if not warmed:
                Engine.start(replace(loaded, plan=plan)).close()
                warmed = True
            with Engine(loaded.machine, loaded.arch, plan, loaded.runner) as engine:
                found[share].append(turn(engine, options.decoding, options.prompt, number))
    lines = [f"{'share':>6}  {'prompt, s':>10}  {'token after, ms':>16}  {'longest wait, ms':>17}"]
    for share, turns in found.items():
        prompt_s, between_s, longest_s = (statistics.median(one) for one in zip(*turns, strict=True))
        lines.append(f"{share:>6}  {prompt_s:>10.3f}  {between_s * 1e3:>16.2f}  {longest_s * 1e3:>17.1f}")
    print("\n".join(lines))
    if options.out:
        made = {"arguments": sys.argv[1:], "turns": {str(k): v for k, v in found.items()}}
        options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    loaded.close()
    return 0


def turn(engine: Engine, decoding: int, length: int, seed: int) -> tuple[float, float, float]:
    """Seconds that the prompt took to its first token; mean and longest seconds between tokens of
    the other sequences meanwhile."""
    generator = random.Random(seed)
    vocabulary = engine.arch.vocab_size
    most = engine.limits.max_model_len - 8
    endless = SamplingParams(temperature=0.0, max_tokens=most - 8, ignore_eos=True)
    names = [f"decoding {place}" for place in range(decoding)]
    for name in names:
        engine.submit(Request(name, tuple(draw_ids(generator, 8, vocabulary)), endless, now()))
    seen: dict[str, list[float]] = {name: [] for name in names}
    began_s = ended_s = 0.0
    while not ended_s:
        for event in engine.events(timeout_s=60.0):
            if isinstance(event, TokenEvent):
                if event.request_id == "long":
                    ended_s = now()
                elif event.request_id in seen:
                    seen[event.request_id].append(now())
            elif isinstance(event, FinishEvent) and event.error:
                raise SystemExit(event.error)
        if not began_s and all(len(times) > 4 for times in seen.values()):
            one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            prompt = tuple(draw_ids(generator, length, vocabulary))
            began_s = now()
            engine.submit(Request("long", prompt, one, began_s))
    gaps = [
        later - earlier
        for times in seen.values()
        for earlier, later in itertools.pairwise([began_s, *(t for t in times if t > began_s), ended_s])
    ]
    return ended_s - began_s, statistics.mean(gaps), max(gaps)


now = time.monotonic

if __name__ == "__main__":
    sys.exit(main())
