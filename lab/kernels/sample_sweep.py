"""Sampling: what a step's draws, adjusted logits and log-probabilities take, and whether they wait.

    python lab/kernels/sample_sweep.py --out DIR [--as sm_89] [--vocab 129280]

Each line is checked against the reference on the same GPU first (tokens must be equal; where two
scores are within a rounding they may differ, which is counted), then timed beside torch's own
softmax, sort and multinomial. The last lines time the host: a whole `Sampler.launch`, and that
nothing in it waits for the device. DIR/sample.json has all of it. Run from the root of the
repository.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from metainfer.kernels.inputs import sample as inputs  # noqa: E402
from metainfer.kernels.inputs.base import Draw  # noqa: E402
from metainfer.kernels.reference import BACKENDS as REFERENCES  # noqa: E402
from metainfer.kernels.registry import Registry  # noqa: E402
from metainfer.kernels.triton import triton_backends  # noqa: E402
from metainfer.kernels.triton.launch import JitLauncher  # noqa: E402
from metainfer.kernels.triton.portable import PtxLauncher  # noqa: E402
from metainfer.llm.request import Request, SamplingParams  # noqa: E402
from metainfer.llm.sample import Row, Sampler, SequenceSampling  # noqa: E402
from metainfer.ops.base import Target  # noqa: E402
from metainfer.ops.sample import SampleCase  # noqa: E402

ROWS = (1, 16, 64, 256)
# (name, inverse temperature, top_p, margin, top_k)
RULES = [
    ("greedy", None),
    ("plain", (1.0, 1.0, -torch.inf, 0)),
    ("top_p 0.9", (1.0, 0.9, -torch.inf, 0)),
    ("top_p 0.9, hot", (0.25, 0.9, -torch.inf, 0)),
    ("top_k 50", (1.0, 1.0, -torch.inf, 50)),
    ("top_k 50, top_p 0.9", (1.0, 0.9, -torch.inf, 50)),
]


def ms(call: Any) -> float:
    return float(triton.testing.do_bench(call, warmup=5, rep=25, return_mode="median"))


def rules_of(rule: Any, rows: int) -> tuple[Any, Any, bool]:
    if rule is None:
        return None, None, False
    rules_R3 = torch.tensor([rule[:3]] * rows, device="cuda")
    numbers = [[rule[3], 7 * row, 1000 + row] for row in range(rows)]
    filters = rule[1] < 1.0 or rule[3] > 0
    return rules_R3, torch.tensor(numbers, device="cuda"), filters


def torchs_own(logits_RV: torch.Tensor, rule: Any) -> Any:
    """What a framework composes: a sort where something is filtered."""

    def draw() -> torch.Tensor:
        if rule is None:
            return logits_RV.argmax(-1)
        x_RV = logits_RV * rule[0]
        if rule[1] < 1.0 or rule[3] > 0:
            x_RV, order_RV = x_RV.sort(-1, descending=True)
            p_RV = x_RV.softmax(-1)
            drops_RV = p_RV.cumsum(-1) - p_RV >= rule[1]
            if rule[3]:
                drops_RV[:, rule[3] :] = True
            return order_RV.gather(1, p_RV.masked_fill(drops_RV, 0).multinomial(1))
        return x_RV.softmax(-1).multinomial(1)

    return draw


def draws(triton_: Any, plain: Any, case: SampleCase) -> list[dict[str, Any]]:
    lines = []
    for rows in ROWS:
        x_RV = torch.randn(rows, case.vocab, device="cuda") * 3
        x_RV[:, :40] += torch.linspace(14, 4, 40, device="cuda")  # as models say it: a few stand out
        for name, rule in RULES:
            given = rules_of(rule, rows)
            ours = triton_["sample.draw"].run(case, x_RV, None, *given)
            theirs = plain["sample.draw"].run(case, x_RV, None, *given)
            line = {
                "what": f"draw, {name}",
                "rows": rows,
                "differ": int((ours != theirs).any(0).sum()),
                "ms": ms(partial(triton_["sample.draw"].run, case, x_RV, None, *given)),
                "torch_ms": ms(torchs_own(x_RV, rule)),
            }
            lines.append(said(line))
    return lines


def others(triton_: Any, plain: Any, case: SampleCase) -> list[dict[str, Any]]:
    lines = []
    for rows in ROWS:
        for op, call in (
            ("sample.adjust", inputs.adjust(case, Draw(1, "cuda"), rows, lists=500)),
            ("sample.logprobs", inputs.logprobs(case, Draw(1, "cuda"), rows, top=20)),
            ("sample.logprobs", inputs.logprobs(case, Draw(1, "cuda"), rows, top=0)),
        ):
            ours, theirs = (by[op].run(case, *call.arguments) for by in (triton_, plain))
            pairs = zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, theirs)), strict=True)
            close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in pairs)
            line = {
                "what": op + (f", top {call.arguments[2]}" if op.endswith("logprobs") else ""),
                "rows": rows,
                "differ": 0 if close else rows,
                "ms": ms(partial(triton_[op].run, case, *call.arguments)),
            }
            lines.append(said(line))
    return lines


def host(registry: Registry, case: SampleCase, target: Target) -> list[dict[str, Any]]:
    """Milliseconds of the host for a launch while the device is busy: if it waited, it would take as
    long as the device."""
    lines = []
    device = torch.device("cuda", 0)
    sampler = Sampler(registry, target, case.vocab, device, 256, "*=triton")
    asked = [{"temperature": 0.0}, {"top_p": 0.9}, {"repetition_penalty": 1.1, "logprobs": 5}]
    for rows in ROWS:
        x_RV = torch.randn(rows, case.vocab, device=device)
        for params in asked:
            states = [
                SequenceSampling(Request(str(n), tuple(range(1000)), SamplingParams(seed=n, **params), 0.0), (1,))
                for n in range(rows)
            ]
            batch = [Row(state, 1000, (), n) for n, state in enumerate(states)]
            sampler.launch(x_RV, batch).wait()
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)  # about 50 ms
            began_s = time.perf_counter()
            waiting = sampler.launch(x_RV, batch)
            launched_s = time.perf_counter() - began_s
            waiting.wait()
            read_s = time.perf_counter() - began_s
            what = "launch, " + ", ".join(f"{k} {v}" for k, v in params.items())
            line = {"what": what, "rows": rows, "host_ms": launched_s * 1e3, "until_read_ms": read_s * 1e3}
            lines.append(said(line))
    return lines


def said(line: dict[str, Any]) -> dict[str, Any]:
    numbers = "  ".join(f"{k} {v:.3f}" for k, v in line.items() if isinstance(v, float))
    print(f"{line['what']:<40} {line['rows']:>4} rows  {numbers}  differ {line.get('differ', '-')}", flush=True)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--as", dest="as_target", default=None)
    parser.add_argument("--vocab", type=int, default=129_280)
    options = parser.parse_args()
    capability = torch.cuda.get_device_capability()
    launch: Any = JitLauncher()
    if options.as_target:
        number = int(options.as_target.removeprefix("sm_"))
        capability = divmod(number, 10)
        launch = PtxLauncher(capability)
    registry = Registry((*triton_backends(launch), *REFERENCES))
    case = SampleCase(options.vocab)
    triton_ = {op: registry.backends(op)["triton"] for op in ("sample.adjust", "sample.draw", "sample.logprobs")}
    plain = {op: registry.backends(op)["reference"] for op in triton_}
    torch.manual_seed(0)
    lines = [*draws(triton_, plain, case), *others(triton_, plain, case)]
    lines += host(registry, case, Target("cuda", capability))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sample.json").write_text(json.dumps(lines, indent=1), encoding="utf-8")
    return int(any(line.get("differ", 0) > 1 for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
