"""Trains pebble until a deadline, on one GPU or (slowly) on a CPU.

    python train.py --config config.json --data DIR --out DIR --minutes 9 [--resume STATE]

DIR of --data holds train.npz and held.npz (see data.py) and tokenizer.json. Weights come out as
bf16 parts of at most 15 MiB in --out; the whole state (fp32, moments) goes to --state.
"""

import argparse
import json
import math
import threading
import time
from pathlib import Path
from queue import Queue

import torch
from data import Documents, Rows, held_out, recall_rows
from model import Config, Pebble, shapes
from optimise import Optimiser, is_matrix
from quantise import cast_weights
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

JUDGED = ("kjv", "docs", "story", "chat")


def initial(c: Config, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Fresh weights and routing buffers; the hash table deals experts evenly over token ids."""
    torch.manual_seed(seed)
    weights = {}
    for name, shape in shapes(c).items():
        w = torch.randn(shape)
        if name.endswith("embed.weight"):
            w *= 0.7
        elif name.endswith("head.weight"):
            w *= 0.02
        elif name.endswith("norm.weight") or name.endswith("_scale"):
            w = torch.ones(shape)
        elif name.endswith("_base"):
            w *= 0.5
            if len(w) > c.streams:
                w[2 * c.streams :] += 2.0 * torch.eye(c.streams).flatten()
        elif name.endswith("attn_sink"):
            w.zero_()
        elif name.endswith("_fn"):
            w *= 0.01
        elif name.endswith(".ape"):
            w *= 0.02
        else:
            w *= shape[-1] ** -0.5
            if name.endswith(("wo_b.weight", "w2", "w2.weight")):
                w *= 0.1
        weights[name] = w
    buffers = {}
    for n in range(len(c.ratios)):
        if n < c.hash_layers:
            per = c.experts // c.topk
            deals = [torch.randperm(c.experts).view(per, c.topk) for _ in range(-(-c.vocab // per))]
            buffers[f"layers.{n}.ffn.gate.tid2eid"] = torch.cat(deals)[: c.vocab].contiguous()
        else:
            buffers[f"layers.{n}.ffn.gate.bias"] = torch.zeros(c.experts)
    return weights, buffers


def write_parts(out: Path, weights: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
    """bf16 matrices, fp32 vectors and buffers, in parts under 15 MiB, each written aside first."""
    parts, size = [{}], 0
    for name, w in {**weights, **buffers}.items():
        small = w.dim() == 1 or name.endswith((".ape", "_fn")) or w.dtype == torch.int64
        w = w.detach().cpu() if small else w.detach().to(torch.bfloat16).cpu()
        if size + w.nbytes > 15_000_000:
            parts.append({})
            size = 0
        parts[-1][name], size = w.contiguous(), size + w.nbytes
    for n, part in enumerate(parts):
        aside = out / f"part{n}.tmp"
        save_file(part, aside)
        aside.rename(out / f"weights{n}.safetensors")


def read_parts(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    every = {}
    for path in sorted(folder.glob("weights*.safetensors")):
        every |= load_file(path)
    buffers = {k: v for k, v in every.items() if k.endswith(("tid2eid", "gate.bias"))}
    return {k: v.float() for k, v in every.items() if k not in buffers}, buffers


class Judge:
    """Held-out bits per byte by source, recall accuracy by depth and a few greedy samples.

    Runs uncompiled in small batches: compiling for shapes that are seen four times costs more.
    """

    rows = 8

    def __init__(self, args, c: Config, model: Pebble, length: int) -> None:
        held = Documents(args.data / "held.npz")
        self.c, self.device = c, args.device
        self.model = Pebble(c, model.buffers, length, args.device, compiled=False)
        self.sets = {s: held_out(held, s, length, args.held_tokens) for s in JUDGED}
        self.recall = recall_rows(held, length, 64)
        self.tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))

    @torch.no_grad()
    def measure(self, w, sparse, simulate: bool) -> str:
        report = []
        for source, (ids, weight, size) in self.sets.items():
            nats = 0.0
            for n in range(0, len(ids), self.rows):
                part = ids[n : n + self.rows].to(self.device)
                keep = weight[n : n + self.rows].to(self.device)
                nats += self.model.losses(w, part[:, :-1], part[:, 1:], keep, sparse, simulate)[0].item()
            report.append(f"{source} {nats / math.log(2) / max(size, 1):.4f}")
        return "bpb " + " ".join(report) + " | recall " + self.recalled(w, sparse, simulate)

    def recalled(self, w, sparse, simulate: bool) -> str:
        ids, mask = self.recall
        right, asked = [0] * 4, [0] * 4
        edges = (256, 512, 1024, 1 << 30)
        for n in range(0, len(ids), self.rows):
            part = ids[n : n + self.rows].to(self.device)
            guess = self.model.logits(w, part[:, :-1], sparse, simulate).argmax(-1).cpu()
            good = guess == ids[n : n + self.rows, 1:]
            for row, ask in zip(good, mask[n : n + self.rows], strict=True):
                at = ask.nonzero()[:, 0]
                if len(at) == 0:
                    continue
                bucket = next(i for i, e in enumerate(edges) if int(at[0]) < e)
                right[bucket] += int(row[at].sum())
                asked[bucket] += len(at)
        return " ".join(f"<{e}: {r / max(a, 1):.2f}" for e, r, a in zip(edges, right, asked, strict=True))

    @torch.no_grad()
    def samples(self, w, sparse, prompts: list[str], new: int = 96) -> list[str]:
        out = []
        ids = [self.tokenizer.encode(p).ids for p in prompts]
        size = [len(i) for i in ids]
        grid = torch.full((len(ids), 256), 2, device=self.device)
        for n, row in enumerate(ids):
            grid[n, : len(row)] = torch.tensor(row)
        for _ in range(new):
            guess = self.model.logits(w, grid, sparse).argmax(-1)
            for n in range(len(ids)):
                if size[n] < 256 and not (size[n] > len(ids[n]) and grid[n, size[n] - 1] == 1):
                    grid[n, size[n]] = guess[n, size[n] - 1]
                    size[n] += 1
        for n in range(len(ids)):
            out.append(self.tokenizer.decode(grid[n, : size[n]].tolist(), skip_special_tokens=False))
        return out


PROMPTS = [
    "<｜begin▁of▁sentence｜><｜User｜>Tell me a story about a rabbit named Tom.<｜Assistant｜></think>",
    "<｜begin▁of▁sentence｜><｜User｜>What is a volcano?<｜Assistant｜></think>",
    "<｜begin▁of▁sentence｜><｜User｜>Who are you?<｜Assistant｜></think>",
    "<｜begin▁of▁sentence｜>Once upon a time, there was a little",
    "<｜begin▁of▁sentence｜>In the beginning",
    "<｜begin▁of▁sentence｜><｜User｜>What is 7 plus 5?<｜Assistant｜></think>",
]


def feeder(rows: Rows, batch: int, device: str) -> Queue:
    queue: Queue = Queue(4)

    def work() -> None:
        while True:
            ids, weight = rows.batch(batch)
            if device == "cuda":
                ids, weight = ids.pin_memory(), weight.pin_memory()
            queue.put((ids, weight))

    threading.Thread(target=work, daemon=True).start()
    return queue


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--state", type=Path, default=Path("/tmp/pebble_state.pt"))
    parser.add_argument("--resume", type=Path, help="a --state file or a folder of parts")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--recall-share", type=float, default=0.25)
    parser.add_argument("--dense-minutes", type=float, default=2.5, help="indexer warm-up")
    parser.add_argument("--cool-from", type=float, default=1.0, help="share of the time at full rate")
    parser.add_argument("--factor", type=float, default=1.0, help="scales the learning rates")
    parser.add_argument("--simulate", action="store_true", help="released number formats")
    parser.add_argument("--held-tokens", type=int, default=120_000)
    parser.add_argument("--judge-minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    begin = time.time()
    deadline = begin + 60 * args.minutes
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # one for every kind of layer
    dtype = getattr(torch, args.dtype)
    c = Config.load(args.config)
    args.out.mkdir(parents=True, exist_ok=True)
    weights, buffers = initial(c, args.seed)
    state = None
    if args.resume and args.resume.is_dir():
        weights, buffers = read_parts(args.resume)
    elif args.resume and args.resume.exists():
        state = torch.load(args.resume, map_location=args.device, weights_only=True)
        weights, buffers = state["weights"], state["buffers"]
    weights = {k: v.to(args.device).float().requires_grad_() for k, v in weights.items()}
    buffers = {k: v.to(args.device) for k, v in buffers.items()}
    optimiser = Optimiser({k: v.detach() for k, v in weights.items()}, c.groups)
    if state:
        optimiser.state = state["optimiser"]
    # Muon's weights are views of the leaves: detach() shares storage, so updates reach both.
    model = Pebble(c, buffers, args.length, args.device, compiled=not args.eager)
    judge = Judge(args, c, model, args.length)
    rows = Rows(Documents(args.data / "train.npz"), args.length, args.seed + optimiser.state["step"], args.recall_share)
    queue = feeder(rows, args.rows, args.device)
    count = sum(w.numel() for w in weights.values())
    print(f"{count / 1e6:.2f} M parameters, {sum(is_matrix(k) for k in weights)} matrices for Muon", flush=True)

    names, step, tokens, judged = list(weights), 0, 0, time.time()
    sparse = torch.zeros((), device=args.device)
    history = []
    while time.time() < deadline - (20 if args.minutes > 2 else 3):
        passed = (time.time() - begin) / (60 * args.minutes)
        sparse.fill_(float(time.time() - begin > 60 * args.dense_minutes))
        cool = 1.0 if passed < args.cool_from else max(0.0, (1 - passed) / (1 - args.cool_from))
        factor = args.factor * min(1.0, (optimiser.state["step"] + 1) / 150) * cool
        ids, weight = (t.to(args.device, non_blocking=True) for t in queue.get())
        w = cast_weights(weights, args.simulate, dtype)
        total, extra, loads = model.losses(w, ids[:, :-1], ids[:, 1:], weight, sparse, args.simulate)
        mean = total / weight.sum()
        grads = torch.autograd.grad(mean + 0.1 * extra, [weights[n] for n in names])
        optimiser.step(dict(zip(names, grads, strict=True)), factor)
        with torch.no_grad():
            for n in range(c.hash_layers, len(c.ratios)):
                uneven = (loads[n].mean() - loads[n]).sign()
                buffers[f"layers.{n}.ffn.gate.bias"].add_(uneven, alpha=1e-3 * max(cool, 0.02))
        step, tokens = step + 1, tokens + args.rows * args.length
        history.append(mean.detach())
        if step == 3:
            print(f"compiled after {time.time() - begin:.0f} s", flush=True)
            mark = (time.time(), tokens)
        if step in (10, 30) or step % 100 == 0:
            loss = torch.stack(history[-50:]).mean().item()
            if not math.isfinite(loss):
                raise SystemExit("the loss is not finite")
            rate = (tokens - mark[1]) / (time.time() - mark[0])
            worst = (loads.max(1).values / loads.mean(1)).max().item()
            peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0
            print(
                f"step {step} {time.time() - begin:.0f} s loss {loss:.4f} index {extra.item():.3f} "
                f"load x{worst:.2f} {rate / 1e3:.0f}k tok/s {tokens / 1e6:.1f} M rate {factor:.3f} {peak:.0f} GiB",
                flush=True,
            )
        if time.time() - judged > 60 * args.judge_minutes:
            judged = time.time()
            w = cast_weights({k: v.detach() for k, v in weights.items()}, args.simulate, dtype)
            print(judge.measure(w, sparse, args.simulate), flush=True)
            write_parts(args.out, weights, buffers)
            mark = (time.time(), tokens)
    plain = {k: v.detach() for k, v in weights.items()}
    write_parts(args.out, plain, buffers)
    torch.save({"weights": plain, "buffers": buffers, "optimiser": optimiser.state}, args.state)
    print(f"saved at {time.time() - begin:.0f} s, {step} steps, {tokens / 1e6:.1f} M tokens", flush=True)
    for simulate in sorted({False, args.simulate}):
        w = cast_weights(plain, simulate, dtype)
        print("released formats" if simulate else "plain", judge.measure(w, sparse, simulate), flush=True)
    for text in judge.samples(w, sparse, PROMPTS):
        print(">>", json.dumps(text, ensure_ascii=False), flush=True)
    (args.out / "history.json").write_text(json.dumps([round(x.item(), 4) for x in history]))


if __name__ == "__main__":
    main()
