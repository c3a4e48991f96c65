"""Measures pebble: bits per byte against gzip and a 5-gram model, formats against bf16 weights,
this engine against transformers, and recall by distance. Writes one JSON file.

    python evaluate.py --checkpoint DIR --weights DIR --train train.npz --out FILE.json

--weights are the bf16 parts of train.py, --train the tokens that the 5-gram model counts.
"""

import argparse
import gzip
import json
import tempfile
from itertools import pairwise
from pathlib import Path

import export
import numpy as np
import torch
from build_quality import EDGES
from data import Documents
from metainfer.arch.families import read_arch
from metainfer.bench.peer_transformers import load_peer
from metainfer.bench.quality import Score, read_documents, read_needles, recalled, score_windows
from metainfer.bench.record import provenance, write_json
from metainfer.llm.engine import Engine
from metainfer.plan.settings import EngineSettings
from metainfer.text.tokenizer import Tokenizer
from metainfer.weights.load import Checkpoint
from ngram import Ngrams


class Texts:
    """Held-out documents by source, cut into windows of token ids."""

    def __init__(self, checkpoint: Path, length: int) -> None:
        self.tokenizer = Tokenizer.load(checkpoint)
        self.windows: dict[str, list[list[int]]] = {}
        self.ids: dict[str, list[int]] = {}
        self.plain: dict[str, bytes] = {}
        documents = read_documents(checkpoint / "quality" / "heldout.jsonl")
        for source in dict.fromkeys(document.source for document in documents):
            texts = [document.text for document in documents if document.source == source]
            ids = self.tokenizer.encode("".join(texts), add_special_tokens=False)
            self.ids[source] = ids
            self.windows[source] = [w for n in range(0, len(ids), length) if len(w := ids[n : n + length]) > 1]
            self.plain[source] = b"".join(self.tokenizer.token_bytes(i) for i in ids if i not in self.markup)

    @property
    def markup(self) -> set[int]:
        """The named tokens at the start of the vocabulary: they stand for no text."""
        return {
            i for i in range(32) if self.tokenizer.token_bytes(i).startswith(("<｜".encode(), b"<think", b"</think"))
        }

    def bytes_of(self, windows: list[list[int]]) -> int:
        """UTF-8 bytes of all tokens that are predicted, without markup."""
        return sum(len(self.tokenizer.token_bytes(i)) for w in windows for i in w[1:] if i not in self.markup)

    def score(self, engine: Engine, most: int | None = None) -> dict[str, Score]:
        return {
            source: score_windows(engine, windows[:most], self.bytes_of(windows[:most]))
            for source, windows in self.windows.items()
        }


@torch.inference_mode()
def peer_score(model, texts: Texts, most: int) -> dict[str, Score]:
    """The same windows in transformers, fp32."""
    out = {}
    for source, windows in texts.windows.items():
        nats, count = 0.0, 0
        for window in windows[:most]:
            ids = torch.tensor([window])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
            nats += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += len(window) - 1
        out[source] = Score(nats, count, texts.bytes_of(windows[:most]))
    return out


def recall_by_distance(engine: Engine, checkpoint: Path, tokenizer: Tokenizer) -> dict[str, str]:
    needles = read_needles(checkpoint / "quality" / "needles.jsonl")
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    right = recalled(engine, [encode(n.prompt) for n in needles], [encode(n.answer) for n in needles])
    out = {}
    for low, high in pairwise(EDGES):
        hits = [hit for hit, n in zip(right, needles, strict=True) if low <= n.distance < high]
        out[f"{low} to {high}"] = f"{sum(hits)} of {len(hits)}"
    return out


def figures(scores: dict[str, Score]) -> dict[str, dict[str, float]]:
    return {
        source: {"bits_per_byte": s.bits_per_byte, "perplexity": s.perplexity, "tokens": s.tokens}
        for source, s in scores.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("checkpoint", "weights", "train", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2047, help="tokens of a window")
    parser.add_argument("--peer-windows", type=int, default=2, help="windows of each source for transformers")
    args = parser.parse_args()
    texts = Texts(args.checkpoint, args.length)
    record: dict = {}
    with Engine.load(args.checkpoint, EngineSettings()) as engine:
        record["compute_dtype"] = engine.plan.compute_dtype.value
        record["released"] = figures(texts.score(engine))
        record["recall"] = recall_by_distance(engine, args.checkpoint, texts.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        dense = Path(folder) / "dense"
        export.export(args.checkpoint / "config.json", args.weights, dense, dense=True)
        with Engine.load(dense, EngineSettings()) as engine:
            record["bf16_weights"] = figures(texts.score(engine))
    with Engine.load(args.checkpoint, EngineSettings(dtype="float32")) as engine:
        record["released_fp32"] = figures(texts.score(engine, args.peer_windows))
    with Checkpoint.open(args.checkpoint, read_arch(args.checkpoint)) as checkpoint:
        peer = load_peer(args.checkpoint, checkpoint, torch.float32)
    record["transformers_fp32"] = figures(peer_score(peer, texts, args.peer_windows))
    counted = Documents(args.train)
    ngrams = Ngrams(counted.tokens, 5, 4096)
    record["baselines"] = {
        source: {
            "gzip": 8 * len(gzip.compress(plain, 9)) / len(plain),
            "5-gram": ngrams.nats(np.array(texts.ids[source]))[1:].sum() / np.log(2) / len(plain),
        }
        for source, plain in texts.plain.items()
    }
    write_json(args.out, record | provenance())
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
