"""A byte-level tokenizer with DeepSeek-V4's special tokens, small enough to train in a test."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from metainfer.text.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
# The vendor's files mark only these as special; the markup of chats is shown when generated.
SPECIAL = (BOS, EOS, "<｜▁pad▁｜>")
MARKUP = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")

_TEXT = """
The wind had dropped by evening, and the harbour lay so still that every lamp on the quay had its
twin in the water. "We shall not sail tonight," said the mate, folding the chart; "not before the
tide, at any rate." Nobody answered him. Somewhere behind the sheds a dog was barking at nothing,
and the cook, who was always cheerful when others were not, began to sing about a girl in Lisbon.
In the morning there was fog. They counted the barrels, wrote the numbers in the book, and waited.
"""


def write_tokenizer(directory: Path, vocab_size: int = 512, **config: object) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` with exactly `vocab_size` tokens;
    `config` adds keys to the latter. Returns `directory`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT.split("\n"), trainer)
    backend.add_tokens([tokenizers.AddedToken(s, normalized=False) for s in MARKUP])
    missing = range(vocab_size - backend.get_vocab_size())
    backend.add_tokens([f"<｜place▁holder▁no▁{i}｜>" for i in missing])
    assert backend.get_vocab_size() == vocab_size, "the alphabet alone needs more"
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    record = {"bos_token": BOS, "eos_token": {"content": EOS}, "add_bos_token": False, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(record), encoding="utf-8")
    return directory


def tiny_tokenizer(directory: Path, vocab_size: int = 512, **config: object) -> Tokenizer:
    """The tokenizer of `write_tokenizer`, loaded."""
    return Tokenizer.load(write_tokenizer(directory, vocab_size, **config))
