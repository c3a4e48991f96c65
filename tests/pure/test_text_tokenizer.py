"""The tokenizer: round trips, bytes, decoding in pieces, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import CheckpointError, RequestError, UserError
from metainfer.text.chat import ChatEncoder
from metainfer.text.generation_config import GenerationConfig
from metainfer.text.tokenizer import IncrementalDecoder, Tokenizer
from tests.fakes.tiny_tokenizer import EOS, tiny_tokenizer, write_tokenizer

VOCAB = 512


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)


@given(st.text(), st.integers(1, 50))
def test_no_text_has_fewer_tokens_than_the_least(
    tokenizer: Tokenizer, text: str, times: int
) -> None:
    assert tokenizer.least_tokens(text * times) <= len(tokenizer.encode(text * times))


def test_a_token_of_an_absurd_id_costs_no_memory(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, VOCAB) / "tokenizer.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    record["model"]["vocab"]["x"] = 4_000_000_000
    file.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UserError, match="has 4000000001 tokens, but the model has 512"):
        Tokenizer.load(tmp_path).check_fits(VOCAB, 0, (1,))


def test_the_least_number_of_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    longest = max(len(tokenizer.token_bytes(i)) for i in range(VOCAB))
    assert tokenizer.least_tokens("x" * 1000) >= 1000 // (2 * longest), "it is of some use"
    file = write_tokenizer(tmp_path, VOCAB) / "tokenizer.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    record["added_tokens"][0]["rstrip"] = True  # swallows any number of spaces
    file.write_text(json.dumps(record), encoding="utf-8")
    assert Tokenizer.load(tmp_path).least_tokens("x" * 1000) == 0


def test_a_tokenizer_without_tokens(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, VOCAB) / "tokenizer.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    record["added_tokens"], record["model"]["vocab"], record["model"]["merges"] = [], {}, []
    file.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(CheckpointError, match="has no tokens"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_json_that_is_nested_too_deeply(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, VOCAB)
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=f"{name} is not JSON"):
        Tokenizer.load(tmp_path)
        GenerationConfig.load(tmp_path)


token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=40)


@given(st.text())
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(token_lists, st.booleans())
def test_decoding_equals_the_library(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == expected


@given(token_lists, st.booleans())
def test_pieces_join_to_the_whole_and_never_split_a_character(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    decoder = IncrementalDecoder(tokenizer, skip)
    pieces = [decoder.push(token_id) for token_id in ids] + [decoder.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip)


@given(st.text(min_size=1))
def test_valid_text_never_shows_a_replacement_character(tokenizer: Tokenizer, text: str) -> None:
    decoder = IncrementalDecoder(tokenizer)
    ids = [tokenizer.token_id(c) for c in _byte_spellings(tokenizer, text.encode())]
    shown = ""
    for token_id in ids:
        assert token_id is not None
        shown += decoder.push(token_id)
        assert text.startswith(shown)
    assert shown + decoder.finish() == text


def _byte_spellings(tokenizer: Tokenizer, data: bytes) -> list[str]:
    """The single-byte tokens that spell `data`."""
    by_byte = {}
    for token_id in range(tokenizer.vocab_size):
        if len(tokenizer.token_bytes(token_id)) == 1:
            by_byte.setdefault(tokenizer.token_bytes(token_id), token_id)
    return [tokenizer._backend.id_to_token(by_byte[bytes([byte])]) for byte in data]


def test_invalid_bytes_become_replacement_characters(tokenizer: Tokenizer) -> None:
    spellings = _byte_spellings(tokenizer, b"a\xe2\x82b\xff")
    ids = [tokenizer.token_id(s) for s in spellings]
    assert tokenizer.decode([i for i in ids if i is not None]) == "a\ufffdb\ufffd"


def test_special_tokens_are_found_and_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a" + EOS)
    assert ids[-1] == tokenizer.eos_token_id == 1
    assert tokenizer.is_special(1)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a" + EOS
    think = tokenizer.token_id("<think>")
    assert think is not None and tokenizer.token_bytes(think) == b"<think>"
    assert tokenizer.decode([think]) == "<think>"


def test_ids_without_a_token_are_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(VOCAB) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_id("no such token") is None


def test_bos_is_added_where_the_config_says_so(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, add_bos_token=True)
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("a")[0] == bos
    assert tokenizer.encode("a", add_special_tokens=False)[0] != bos
    assert tokenizer.encode("<｜begin▁of▁sentence｜>a").count(bos) == 1


def test_lengths_in_the_file_neither_cut_nor_fill_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello world " * 20}]
    plain = tiny_tokenizer(tmp_path)
    wanted = plain.encode("hello world " * 20)
    chat = ChatEncoder(plain, thinking=False).encode(messages)
    record = json.loads(plain.file.read_text(encoding="utf-8"))
    cut = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 999}, "direction": "Right", "pad_to_multiple_of": None}
    fill |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    for left_over in ({"truncation": cut}, {"padding": fill}):
        plain.file.write_text(json.dumps(record | left_over), encoding="utf-8")
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode("hello world " * 20) == wanted
        assert ChatEncoder(tokenizer, thinking=False).encode(messages) == chat


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("\ud800")


def test_a_tokenizer_of_another_model_is_refused_with_the_numbers(tokenizer: Tokenizer) -> None:
    tokenizer.check_fits(512, 0, (1,))
    tokenizer.check_fits(515, 0, (7, 1))  # padded embedding
    with pytest.raises(UserError, match=r"512 tokens, but the model has 129280"):
        tokenizer.check_fits(129_280, 0, (1,))
    with pytest.raises(UserError, match=r"512 tokens, but the model has 500"):
        tokenizer.check_fits(500, 0, (1,))
    with pytest.raises(UserError, match=r"token 0, but the model's config says 3"):
        tokenizer.check_fits(512, 3, (1,))
    with pytest.raises(UserError, match=r"token 1, but the model's config says 2, 3"):
        tokenizer.check_fits(512, 0, (2, 3))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, "", "{", "[]", "\ufffd"])
def test_missing_and_broken_files_are_named(tmp_path: Path, name: str, content: str | None) -> None:
    file = write_tokenizer(tmp_path) / name
    if content is None:
        file.unlink()
    else:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(tmp_path)


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    record["decoder"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always",
        "split": True,
    }
    file.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UserError, match="Metaspace"):
        Tokenizer.load(tmp_path)


def test_generation_config(tmp_path: Path) -> None:
    assert GenerationConfig.load(tmp_path) == GenerationConfig()
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": null, "do_sample": true, "thinking": false}')
    assert GenerationConfig.load(tmp_path) == GenerationConfig(temperature=0.6, thinking=False)
    file.write_text('{"top_p": "0.9"}')
    with pytest.raises(CheckpointError, match="top_p is '0.9'"):
        GenerationConfig.load(tmp_path)
