"""Writes heldout.jsonl and needles.jsonl, the gate that ships with the model, from held.npz.

    python build_quality.py --held held.npz --tokenizer tokenizer.json --out DIR

heldout.jsonl: whole held-out documents of every kind of text. needles.jsonl: prompts up to an
answer that must be given back, spread over the distances between fact and question.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from data import RECALL, SOURCES, Documents
from tokenizers import Tokenizer

TEXTS = ("kjv", "docs", "story", "chat")
EDGES = (0, 128, 256, 512, 1024, 2048)  # tokens between a fact and the question about it


def documents(held: Documents, tokenizer: Tokenizer, most: int) -> list[dict]:
    """Held-out documents, in the file's (shuffled) order, up to `most` tokens of each source."""
    lines = []
    for source in TEXTS:
        used = 0
        for n in np.flatnonzero(held.source == SOURCES.index(source)):
            ids = held.tokens[held.span(n)].tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False)
            if used + len(ids) > most or tokenizer.encode(text, add_special_tokens=False).ids != ids:
                continue
            used += len(ids)
            lines.append({"source": source, "text": text})
    return lines


def needles(held: Documents, tokenizer: Tokenizer, length: int, most: int) -> list[dict]:
    """First questions of recall documents, `most` for each range of distances."""
    taken = [0] * (len(EDGES) - 1)
    lines = []
    for n in np.flatnonzero(held.source == RECALL):
        span = held.span(n)
        ids, boost = held.tokens[span].tolist(), held.boost[span]
        marked = np.flatnonzero(boost)
        if len(marked) == 0 or len(ids) > length:
            continue
        start = int(marked[0])
        end = start + int(np.argmin(np.append(boost[start:], 0)))
        answer = ids[start:end]
        earlier = [i for i in range(start - len(answer)) if ids[i : i + len(answer)] == answer]
        if not earlier:
            continue  # tokenised differently where it was stated
        distance = start - earlier[-1]
        which = int(np.searchsorted(EDGES, distance, "right")) - 1
        prompt, text = (tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:start], answer))
        whole = tokenizer.encode(prompt, add_special_tokens=False).ids
        if whole != ids[:start] or which >= len(taken) or taken[which] == most:
            continue
        taken[which] += 1
        lines.append({"prompt": prompt, "answer": text, "distance": distance})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("held", "tokenizer", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each kind of text")
    parser.add_argument("--needles", type=int, default=16, help="for each range of distances")
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    held, tokenizer = Documents(args.held), Tokenizer.from_file(str(args.tokenizer))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, lines in (
        ("heldout", documents(held, tokenizer, args.tokens)),
        ("needles", needles(held, tokenizer, args.length, args.needles)),
    ):
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        print(path.name, len(lines), "lines,", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
