"""Builds tokenizer.json, train.npz and held.npz from the raw texts (see README.md for sources).

    python build_corpus.py --kjv plain_text_readers_bible.py --docs _sources --teacher DIR --out DIR
        [--tokenizer tokenizer.json]

Two documents of a hundred, chosen by the hash of their text, are held out.
"""

import argparse
import ast
import hashlib
import json
import lzma
import random
from pathlib import Path

import numpy as np
from data import SOURCES
from synthetic import ASSISTANT, BOS, EOS, USER, drills, recall
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 4096
SPECIAL = [
    BOS,
    EOS,
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜begin▁sys｜>",
    "<｜end▁sys｜>",
]
WORD = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def held(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 50 == 0


def pieces(text: str, size: int) -> list[str]:
    """Cuts at line ends into documents of about `size` characters."""
    out, part = [], ""
    for line in text.splitlines(keepends=True):
        part += line
        if len(part) >= size:
            out.append(part.strip("\n"))
            part = ""
    return [*out, part.strip("\n")] if part.strip() else out


def kjv(path: Path) -> list[str]:
    """The plain text is the first long string of the module; brackets mark italics and go."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    text = max(texts, key=len).translate(str.maketrans("", "", "[]"))
    return pieces(text, 4000)


def docs(folder: Path) -> list[str]:
    out = []
    for path in sorted(folder.rglob("*.rst.txt")):
        out += pieces(path.read_text(encoding="utf-8"), 3000)
    return [d for d in dict.fromkeys(out) if len(d) > 200]


def dialogues(folder: Path) -> list[dict]:
    seen, out = set(), []
    for path in sorted(folder.glob("*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for document in map(json.loads, lines):
                key = document["messages"][-1]
                if key not in seen:
                    seen.add(key)
                    out.append(document)
    return out


def render(messages: list[str]) -> str:
    """V4's chat encoding without thinking and without a system text."""
    turns = (USER + text + ASSISTANT if n % 2 == 0 else text + EOS for n, text in enumerate(messages))
    return BOS + "".join(turns)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # As in DeepSeek's file only the first three are hidden by a decode that skips special tokens.
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["id"] < 3
    return Tokenizer.from_str(json.dumps(document))


def write(path: Path, tokenizer: Tokenizer, documents: list[tuple[str, list[tuple[str, int]]]]) -> None:
    flat = [piece for _, parts in documents for piece in parts]
    encoded = tokenizer.encode_batch([text for text, _ in flat], add_special_tokens=False)
    tokens, boost, starts, sizes, at = [], [], [0], [], 0
    for _, parts in documents:
        for _, mark in parts:
            ids = encoded[at].ids
            tokens.append(np.array(ids, np.uint16))
            boost.append(np.full(len(ids), mark, np.uint8))
            at += 1
        starts.append(starts[-1] + sum(len(encoded[at - 1 - n].ids) for n in range(len(parts))))
        sizes.append(sum(len(text.encode()) for text, _ in parts))
    np.savez_compressed(
        path,
        tokens=np.concatenate(tokens),
        boost=np.concatenate(boost),
        starts=np.array(starts, np.int64),
        source=np.array([SOURCES.index(s) for s, _ in documents], np.uint8),
        bytes=np.array(sizes, np.int64),
    )
    total = {s: sum(starts[n + 1] - starts[n] for n, (k, _) in enumerate(documents) if k == s) for s in SOURCES}
    print(path.name, len(documents), "documents,", starts[-1], "tokens:", total)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("kjv", "docs", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--recall", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    r = random.Random(args.seed)
    plain = lambda text: [(BOS + text + EOS, 0)]  # noqa: E731
    corpus = [("kjv", plain(d), held(d)) for d in kjv(args.kjv)]
    corpus += [("docs", plain(d), held(d)) for d in docs(args.docs)]
    stories: tuple[list[str], list[str]] = ([], [])
    for document in dialogues(args.teacher) if args.teacher else []:
        kind, messages = document["kind"], document["messages"]
        out = held(messages[0] + messages[-1])
        if kind == "story":
            stories[out].append(messages[1])
        bare = kind == "story" and len(messages) == 2 and r.random() < 0.5
        corpus.append((kind, plain(messages[1]) if bare else [(render(messages), 0)], out))
    if not args.teacher:
        for kind, parts, out in corpus:
            if kind == "kjv":
                stories[out].append(parts[0][0][len(BOS) : -len(EOS)])
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        lines = [
            parts[0][0]
            for k, parts, out in corpus
            if not out and r.random() < {"docs": 0.35, "story": 0.2, "chat": 0.2}.get(k, 1.0)
        ]
        tokenizer = train_tokenizer([line for text in lines for line in text.split(EOS)])
        args.out.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(args.out / "tokenizer.json"))
    count = lambda text: len(text) // 4 + 1  # noqa: E731
    for n in range(args.recall):
        out = n % 50 == 0
        longest = 3900 if n % 9 == 1 else 1950
        length = int(60 * (longest / 60) ** r.random()) if longest < 3000 else r.randint(1950, longest)
        parts = recall(r, stories[out], length, r.randint(1, min(8, max(1, length // 50))), count)
        corpus.append(("recall", parts, out))
    for n in range(30000):
        corpus.append(("drill", drills(r), n % 50 == 0))
    r.shuffle(corpus)
    for name, wanted in (("train", False), ("held", True)):
        write(args.out / f"{name}.npz", tokenizer, [(k, p) for k, p, out in corpus if out == wanted])


if __name__ == "__main__":
    main()
