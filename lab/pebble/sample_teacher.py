"""Samples dialogues and stories from the teacher until a deadline; writes xz JSON lines parts.

    python sample_teacher.py --teacher DIR --out DIR --minutes 5 [--rows 4096] [--seed 1]

One line a document: {"kind", "messages": [user, assistant, ...]}. Stories keep the teacher's text.
"""

import argparse
import json
import lzma
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prompts
import torch
from teacher import Teacher
from tokenizers import Tokenizer

# kind: prompt slots, new tokens, temperature
PLAN = {
    "story": (128, 256, 0.7),
    "chat": (64, 128, 0.5),
    "more": (320, 128, 0.5),
}


def usable(text: str) -> bool:
    """Keeps plain English answers: ASCII, no talk about models, not too repetitive."""
    if len(text) < 12 or not text.isascii() or any(w in text for w in ("SmolLM", "Hugging", "AI ")):
        return False
    words = text.lower().split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(grams) < 8 or len(set(grams)) > 0.9 * len(grams)


class Parts:
    """Appends xz streams to numbered parts of at most 15 MiB, compressing in the background."""

    def __init__(self, out: Path) -> None:
        self.out, self.number, self.pool = out, 0, ThreadPoolExecutor(12)
        self.pending = []
        out.mkdir(parents=True, exist_ok=True)

    def write(self, lines: list[str]) -> None:
        self.pending.append(self.pool.submit(lzma.compress, "".join(lines).encode(), preset=6))
        self.drain(wait=False)

    def drain(self, wait: bool) -> None:
        while self.pending and (wait or self.pending[0].done()):
            data = self.pending.pop(0).result()
            path = self.out / f"teacher{self.number}.jsonl.xz"
            if path.exists() and path.stat().st_size + len(data) > 15 << 20:
                self.number += 1
                path = self.out / f"teacher{self.number}.jsonl.xz"
            if self.number > 5:
                raise SystemExit("six parts are full")
            with path.open("ab") as file:
                file.write(data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    deadline = time.time() + 60 * args.minutes
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    teacher = Teacher(args.teacher, args.device, dtype)
    encoder = Tokenizer.from_file(f"{args.teacher}/tokenizer.json")
    parts = Parts(args.out)
    # Kinds are run in blocks, since a change of shape captures its graphs anew.
    blocks = [("story", 0.45), ("chat", 0.30), ("more", 0.25)]
    total_tokens, waiting, begin = 0, [], time.time()
    for kind, share in blocks:
        until = time.time() + share * (deadline - begin)
        last = 0.0
        while time.time() + last < until:
            started = time.time()
            slots, new, temperature = PLAN[kind]
            jobs = []
            while len(jobs) < args.rows:
                if kind == "more":
                    if not waiting:
                        break
                    head, turns = waiting.pop(rng.randrange(len(waiting)))
                    follow = prompts.FOLLOW_STORY if head == "story" else prompts.FOLLOW
                    turns = [*turns, rng.choice(follow)]
                    told = turns
                else:
                    head, asked, command = getattr(prompts, {"chat": "question"}.get(kind, kind))(rng)
                    turns, told = [asked], [command]
                ids = encoder.encode(prompts.teacher_text(head, told)).ids
                if len(ids) <= slots:
                    jobs.append((head, turns, ids))
            if len(jobs) < args.rows:
                break
            answers = teacher.generate([ids for *_, ids in jobs], slots, new, temperature)
            lines, kept = [], 0
            texts = encoder.decode_batch([a or [] for a in answers])
            for (head, turns, _), answer, text in zip(jobs, answers, texts, strict=True):
                text = text.strip()
                if answer is None or not usable(text):
                    continue
                document = [*turns, text]
                kept += len(answer)
                if kind != "more" and rng.random() < 0.5:
                    waiting.append((head, document))
                    if kind == "chat":
                        continue
                if kind == "more" and len(document) < 6:
                    waiting.append((head, document))
                lines.append(json.dumps({"kind": head, "messages": document}) + "\n")
            total_tokens += kept
            parts.write(lines)
            last = time.time() - started
            print(
                f"{kind} {len(lines)}/{args.rows} kept, {kept} tokens, {last:.1f} s, all {total_tokens / 1e6:.1f} M",
                flush=True,
            )
            if kind == "story" or total_tokens < 3e6:
                print("   ", lines[0][:700] if lines else "nothing", flush=True)
    parts.write([json.dumps({"kind": k, "messages": m}) + "\n" for k, m in waiting])
    parts.drain(wait=True)


if __name__ == "__main__":
    main()
