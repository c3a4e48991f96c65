"""What both settings of `bench quality` are given: windows of token ids, and needles. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metainfer.arch.record import Arch
from metainfer.bench.quality import read_documents, read_lines, read_needles
from metainfer.bench.quality_settings import QualityLoad
from metainfer.bench.traffic import draw_prompts
from metainfer.core.errors import UserError
from metainfer.text.tokenizer import TOKENIZER_FILE, Tokenizer

_RANDOM = "random token ids"
_HELDOUT, _NEEDLES = "quality/heldout.jsonl", "quality/needles.jsonl"


@dataclass(frozen=True, slots=True)
class Hidden:
    """A needle as token ids; `distance`: tokens between the fact and the question."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    distance: int


@dataclass(frozen=True, slots=True)
class QualityData:
    """`source`: where the windows are from; `held_out`: they are no random numbers."""

    windows: tuple[tuple[int, ...], ...]
    needles: tuple[Hidden, ...]
    source: str
    held_out: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence but for what is generated."""
        prompts = [len(needle.prompt) + len(needle.answer) for needle in self.needles]
        return max([*map(len, self.windows), *prompts])


def read_data(load: QualityLoad, model: Path, arch: Arch) -> QualityData:
    """Raises UserError naming the file that is missing or wrong."""
    tokenizer = Tokenizer.load(model) if (model / TOKENIZER_FILE).is_file() else None
    if tokenizer is None and (load.text is not None or load.needles is not None):
        raise UserError(
            f"{model} has no {TOKENIZER_FILE}, which --text and --needles need",
            hint="give --token-ids, or copy the tokenizer files next to config.json",
        )
    windows, source = _windows(load, model, arch, tokenizer)
    if not windows:
        raise UserError(
            f"{source} holds no windows of two tokens or more",
            hint="--text takes lines of text, --token-ids lists of token ids",
        )
    needles: list[Hidden] = []
    path = load.needles or model / _NEEDLES
    if tokenizer is not None and (load.needles is not None or path.is_file()):
        for n, needle in enumerate(read_needles(path), 1):
            prompt, answer = (_ids(tokenizer, t) for t in (needle.prompt, needle.answer))
            if not prompt or not answer:
                raise UserError(f"{path}, line {n}: its prompt or its answer has no tokens")
            if len(prompt) + len(answer) < arch.max_model_len:
                needles.append(Hidden(prompt, answer, needle.distance))
        if load.needles is not None and load.most_needles and not needles:
            raise UserError(
                f"{path} holds no needle that fits into {arch.max_model_len} tokens",
                hint="--num-needles 0 leaves them out",
            )
    return QualityData(
        windows, _spread(needles, load.most_needles), source, held_out=source != _RANDOM
    )


def _windows(
    load: QualityLoad, model: Path, arch: Arch, tokenizer: Tokenizer | None
) -> tuple[tuple[tuple[int, ...], ...], str]:
    most = min(load.window_tokens, arch.max_model_len - 1)
    if load.token_ids is not None:
        found = [ids[:most] for ids in _read_ids(load.token_ids, arch.vocab_size)]
        return tuple(found[: load.windows]), str(load.token_ids)
    path = load.text or model / _HELDOUT
    if tokenizer is None or (load.text is None and not path.is_file()):
        drawn = draw_prompts(f"{load.seed}/quality", load.windows, most, arch.vocab_size)
        return tuple(map(tuple, drawn)), _RANDOM
    texts = [_ids(tokenizer, document.text)[:most] for document in read_documents(path)]
    return _spread([ids for ids in texts if len(ids) > 1], load.windows), str(path)


def _spread(items: Sequence, most: int) -> tuple:
    """At most so many, evenly out of all."""
    count = min(most, len(items))
    return tuple(items[n * len(items) // count] for n in range(count))


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _read_ids(path: Path, vocab_size: int) -> list[tuple[int, ...]]:
    windows = []
    for n, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            ids = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {n}: not JSON: {error}") from error
        good = isinstance(ids, list) and len(ids) > 1
        if not good or any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
            raise UserError(
                f"{path}, line {n}: not a list of two or more token ids below {vocab_size}"
            )
        windows.append(tuple(ids))
    return windows
