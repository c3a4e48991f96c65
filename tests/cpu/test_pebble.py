"""The model that ships: complete, as good as it was, and the same in transformers."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator

import pytest
import torch

from metainfer.arch.families import read_arch
from metainfer.bench.peer_transformers import load_peer
from metainfer.bench.quality import (
    read_documents,
    read_needles,
    recalled,
    score_windows,
    total,
)
from metainfer.llm.engine import Engine
from metainfer.llm.offline import generate
from metainfer.llm.request import SamplingParams
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import pebble_dir
from metainfer.text.chat import ChatEncoder
from metainfer.text.tokenizer import Tokenizer
from metainfer.weights.load import Checkpoint

DIRECTORY = pebble_dir()
QUALITY = DIRECTORY / "quality"
MOST_BYTES = 20_000_000
NEAR_RECALL = 0.5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DIRECTORY)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(DIRECTORY, EngineSettings(dtype="float32", threads=1)) as engine:
        yield engine


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_shards_are_whole_and_small() -> None:
    shards = sorted(DIRECTORY.glob("*.safetensors"))
    assert sum(shard.stat().st_size for shard in shards) < MOST_BYTES
    assert all(shard.stat().st_size < 8_000_000 for shard in shards)


def test_the_tokenizer_fits_and_gives_back_every_held_out_text(tokenizer: Tokenizer) -> None:
    arch = read_arch(DIRECTORY)
    tokenizer.check_fits(arch.vocab_size, arch.bos_token_id, arch.eos_token_ids)
    for document in read_documents(QUALITY / "heldout.jsonl"):
        ids = encode(tokenizer, document.text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == document.text


def test_held_out_text_is_predicted_better_than_gzip_packs_it(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    """The bounds are a little above what was measured (docs/benchmarks/pebble-quality.md)."""
    documents = read_documents(QUALITY / "heldout.jsonl")
    for source, most in {"kjv": 1.35, "docs": 1.35, "story": 0.85, "chat": 0.6}.items():
        texts = [document.text for document in documents if document.source == source]
        while sum(map(len, texts)) > 5_000 and len(texts) > 1:
            texts.pop()
        scores = []
        for text in texts:
            window = encode(tokenizer, text)
            scores.append(score_windows(engine, [window], len(text.encode())))
        found = total(scores).bits_per_byte
        packed = "".join(texts).encode()
        assert found < most
        assert found < 8 * len(gzip.compress(packed, 9)) / len(packed) / 2


def test_perplexity_is_that_of_transformers(engine: Engine, tokenizer: Tokenizer) -> None:
    """Over a window long enough for the indexer to choose among entries."""
    texts = [d.text for d in read_documents(QUALITY / "heldout.jsonl") if d.source == "kjv"]
    window = encode(tokenizer, "".join(texts))[:1100]
    score = score_windows(engine, [window], 1)
    with Checkpoint.open(DIRECTORY, read_arch(DIRECTORY)) as checkpoint:
        peer = load_peer(DIRECTORY, checkpoint, torch.float32)
    with torch.inference_mode():
        logits = peer(input_ids=torch.tensor([window]), use_cache=False).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(window[1:]))
    assert score.perplexity == pytest.approx(math.exp(nats.item()), rel=1e-4)


def test_facts_are_recalled_within_the_trained_context(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    needles = [n for n in read_needles(QUALITY / "needles.jsonl") if n.distance < 128]
    prompts = [encode(tokenizer, needle.prompt) for needle in needles]
    assert all(len(prompt) <= 2048 for prompt in prompts)
    right = recalled(engine, prompts, [encode(tokenizer, needle.answer) for needle in needles])
    assert sum(right) >= NEAR_RECALL * len(needles)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Who are you?", "Pebble"),
        ("What is the capital of France?", "Paris"),
        ("What is 7 plus 5?", "12"),
    ],
)
def test_simple_questions(engine: Engine, tokenizer: Tokenizer, question: str, words: str) -> None:
    encoder = ChatEncoder(tokenizer, thinking=False)
    prompt = encoder.encode([{"role": "user", "content": question}]).token_ids
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    (result,) = generate(engine, [prompt], sampling)
    assert words in tokenizer.decode(result.token_ids)
    assert result.stop_token_id == tokenizer.eos_token_id
