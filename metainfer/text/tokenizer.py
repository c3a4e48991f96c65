"""Text to token ids and back: a byte-level tokenizer read from a model's directory.

Owns `tokenizer.json` and `tokenizer_config.json`, the bytes of every token, and decoding that
never shows half a character. Knows nothing of chat formats (`chat.py`) or models.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from metainfer.core.errors import CheckpointError, RequestError, UserError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

# Embedding tables are padded to round sizes, so a few ids may have no token: this share of them.
_MOST_PADDING = 0.01


class Tokenizer:
    """A tokenizer whose tokens are byte strings.

    Attributes:
        file: the `tokenizer.json` it was read from.
        config: the contents of `tokenizer_config.json`.
        vocab_size: the highest token id plus one.
        bos_token_id, eos_token_id: as `tokenizer_config.json` spells them, None if it does not.
    """

    def __init__(self, file: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        self.file = file
        self.config = config
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._bytes: dict[int, bytes] = {}  # of the tokens seen so far: a file may name any id
        self._longest_bytes = self._bound_of_tokens(vocabulary)
        self.bos_token_id = self._id_of_role("bos_token")
        self.eos_token_id = self._id_of_role("eos_token")

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read the tokenizer of a model directory.

        Raises CheckpointError when a file is missing or broken, UserError when it is not of the
        byte-level kind.
        """
        file, config_file = Path(directory) / TOKENIZER_FILE, Path(directory) / CONFIG_FILE
        for needed in (file, config_file):
            if not needed.is_file():
                raise CheckpointError(
                    f"{needed} is missing", hint="copy the tokenizer files next to config.json"
                )
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{config_file} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{config_file} does not hold a JSON object")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(f"{file} is not a tokenizer: {error}") from error
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            kind = type(backend.decoder).__name__
            raise UserError(f"{file} has a {kind} decoder; only ByteLevel tokenizers are supported")
        if not backend.get_vocab_size(with_added_tokens=True):
            raise CheckpointError(f"{file} has no tokens")
        # Left over from training, these would cut prompts or fill them up without a word.
        backend.no_truncation()
        backend.no_padding()
        return cls(file, backend, config)

    def check_fits(self, vocab_size: int, bos_token_id: int, eos_token_ids: Sequence[int]) -> None:
        """Compare with what the model's config says. Raises UserError naming the numbers."""
        padding = vocab_size - self.vocab_size
        if not 0 <= padding <= vocab_size * _MOST_PADDING:
            raise UserError(
                f"{self.file} has {self.vocab_size} tokens, but the model has {vocab_size}",
                hint="the tokenizer and the weights belong to different models",
            )
        if self.bos_token_id not in (None, bos_token_id):
            raise UserError(
                f"{self.file} begins text with token {self.bos_token_id}, "
                f"but the model's config says {bos_token_id} (bos_token_id)"
            )
        if self.eos_token_id is not None and self.eos_token_id not in eos_token_ids:
            ids = ", ".join(map(str, eos_token_ids))
            raise UserError(
                f"{self.file} ends text with token {self.eos_token_id}, "
                f"but the model's config says {ids} (eos_token_id)"
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Spellings of special tokens inside it become those tokens.

        `add_special_tokens` adds what the tokenizer's own files say (often nothing). Other Python
        threads run meanwhile. Raises RequestError for text that is not valid Unicode.
        """
        try:
            # The batch call lets other threads run; the single one does not.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "the text is not valid Unicode (a lone surrogate)", code="invalid_value"
            ) from error
        ids: list[int] = encoding.ids
        bos = self.bos_token_id
        wants_bos = add_special_tokens and self.config.get("add_bos_token") is True
        if wants_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def to_json(self) -> str:
        """The tokenizer as a `tokenizer.json`, for other libraries that encode with it."""
        text: str = self._backend.to_str()
        return text

    def least_tokens(self, text: str) -> int:
        """No encoding of `text` has fewer tokens; found without encoding it, for texts so long
        that this would take seconds. 0 where nothing can be said."""
        return 0 if self._longest_bytes is None else len(text) // self._longest_bytes

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of whole tokens; bytes that are not UTF-8 become U+FFFD."""
        decoder = IncrementalDecoder(self, skip_special_tokens)
        return "".join(map(decoder.push, token_ids)) + decoder.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for ids that have no token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token on its own, as text."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup of the model rather than text."""
        return token_id in self._special

    def token_id(self, spelling: str) -> int | None:
        """The id of the token with exactly that spelling, or None."""
        found: int | None = self._backend.token_to_id(spelling)
        return found

    def _bound_of_tokens(self, vocabulary: Mapping[str, int]) -> int | None:
        """Bytes of the longest token, or None if some tokens stand for text of any length: a
        normalizer may shorten a text, and added tokens may swallow the spaces around them."""
        added = self._added.values()
        if self._backend.normalizer is not None or any(t.lstrip or t.rstrip for t in added):
            return None
        # In a byte-level vocabulary a character is a byte; added tokens are spelt as they are.
        return max(len(spelling.encode("utf-8")) for spelling in vocabulary)

    def _read_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            content: str = self._added[token_id].content
            return content.encode("utf-8")
        spelling = self._backend.id_to_token(token_id)
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, spelling)) if spelling else b""

    def _id_of_role(self, role: str) -> int | None:
        spelling = self.config.get(role)
        if isinstance(spelling, dict):
            spelling = spelling.get("content")
        return self.token_id(spelling) if isinstance(spelling, str) else None


class IncrementalDecoder:
    """Decodes a growing sequence of tokens: the pieces joined are the decoded whole.

    A piece never ends within a UTF-8 character; its bytes wait for the next token.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became whole with this token, possibly none."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD where the last character stayed incomplete."""
        return self._utf8.decode(b"", final=True)


def _characters_of_bytes() -> list[str]:
    """The character that byte-level vocabularies write for each byte (GPT-2's table): printable
    Latin-1 characters stand for themselves, the others for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(_characters_of_bytes())}
