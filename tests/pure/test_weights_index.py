"""Reading safetensors headers and indices: every way in which a file can lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metainfer.core.errors import CheckpointError
from metainfer.weights.index import INDEX_NAME, CheckpointIndex, read_header

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "I8", "shape": [3], "data_offsets": [8, 11]},
    "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
}


def file_bytes(header: Any, data: bytes = b"\0" * 11, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(path: Path, header: Any, **kwargs: Any) -> Path:
    path.write_bytes(file_bytes(header, **kwargs))
    return path


def test_good_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", GOOD)
    entries = read_header(path)
    start = path.stat().st_size - 11
    assert (entries["a"].dtype, entries["a"].shape) == ("F32", (2, 1))
    assert (entries["a"].start, entries["a"].stop) == (start, start + 8)
    assert entries["b"].nbytes == 3
    index = CheckpointIndex.read(tmp_path)
    assert index.problems == ()
    assert set(index.entries) == {"a", "b"}


def entry(**changes: Any) -> dict[str, Any]:
    return GOOD | {"a": GOOD["a"] | changes}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes"),
        (b"\1\0\0", "3 bytes"),
        (file_bytes(GOOD, length=2**63), f"header of {2**63} bytes"),
        (file_bytes(GOOD, length=10**6), "header of 1000000 bytes"),
        (file_bytes(GOOD)[:-1], "truncated"),
        (file_bytes(GOOD, data=b""), "truncated"),
        (file_bytes(GOOD, data=b"\0" * 12), "1 bytes that no tensor claims"),
        (file_bytes(b"{"), "not JSON"),
        (file_bytes(b"\xff\xfe"), "not JSON"),
        (file_bytes(b"[" * 50_000), "not JSON"),
        (file_bytes(b"[]"), "not a JSON object"),
        (file_bytes(b'{"a": 1, "a": 2}'), "'a' appears twice"),
        (file_bytes({"a": 7}), "'a' without an object"),
        (file_bytes(entry(dtype="F33")), "unknown dtype 'F33'"),
        (file_bytes(entry(dtype=None)), "unknown dtype None"),
        (file_bytes(entry(dtype=["F32"])), "unknown dtype"),
        (file_bytes(entry(dtype="BF16")), "does not fill its 8 bytes"),
        (file_bytes(entry(shape=[3])), "does not fill its 8 bytes"),
        (file_bytes(entry(shape=[-2, -1])), "shape [-2, -1]"),
        (file_bytes(entry(shape=[2.0])), "shape [2.0]"),
        (file_bytes(entry(shape=[True])), "shape [True]"),
        (file_bytes(entry(shape="2")), "shape '2'"),
        (file_bytes(entry(shape=[2**64])), "shape"),
        (file_bytes(entry(shape=[1] * 100)), "shape"),
        (file_bytes(entry(data_offsets=[8, 0])), "offsets [8, 0]"),
        (file_bytes(entry(data_offsets=[0])), "offsets [0]"),
        (file_bytes(entry(data_offsets=[-8, 0])), "offsets [-8, 0]"),
        (file_bytes(entry(data_offsets=[1000, 1008])), "up to byte"),
        (file_bytes(entry(data_offsets=[3, 11])), "leaves a gap after the header"),
        (
            file_bytes(GOOD | {"c": {"dtype": "U8", "shape": [2], "data_offsets": [9, 11]}}),
            "overlaps with 'b'",
        ),
    ],
)
def test_lying_headers(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert expected in caught.value.message
    assert "model.safetensors" in caught.value.message
    assert CheckpointIndex.read(tmp_path).problems == (caught.value.message,)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
declared = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I8", "BF16", "F4", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 2**70), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
    }
)
files = st.one_of(
    st.binary(max_size=64),
    st.builds(file_bytes, st.binary(max_size=32), st.binary(max_size=16)),
    st.builds(file_bytes, json_values, st.binary(max_size=16)),
    st.builds(
        file_bytes,
        st.dictionaries(st.text(max_size=4), declared | json_values, max_size=3),
        st.binary(max_size=40),
        st.none() | st.integers(0, 2**64 - 1),
    ),
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=files)
def test_any_bytes_give_tensors_inside_the_file_or_a_checkpoint_error(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        entries = read_header(path)
    except CheckpointError:
        return
    covered = sorted((entry.start, entry.stop) for entry in entries.values())
    position = 8 + int.from_bytes(content[:8], "little")
    for start, stop in covered:
        assert start == position <= stop
        position = stop
    assert position == len(content)


def index_file(directory: Path, weight_map: Any) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def one_tensor(name: str) -> dict[str, Any]:
    return {name: {"dtype": "U8", "shape": [11], "data_offsets": [0, 11]}}


def test_shards(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", one_tensor("a"))
    write(tmp_path / "2.safetensors", one_tensor("b"))
    index_file(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    index = CheckpointIndex.read(tmp_path)
    assert index.problems == ()
    assert {name: found.path.name for name, found in index.entries.items()} == {
        "a": "1.safetensors",
        "b": "2.safetensors",
    }


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", one_tensor("a"))
    write(tmp_path / "2.safetensors", one_tensor("a"))
    write(tmp_path / "3.safetensors", GOOD, data=b"")
    index_file(
        tmp_path,
        {
            "a": "1.safetensors",
            "b": "2.safetensors",
            "c": "3.safetensors",
            "d": "4.safetensors",
            "e": "../5.safetensors",
        },
    )
    problems = "\n".join(CheckpointIndex.read(tmp_path).problems)
    assert "a is both in 1.safetensors and in 2.safetensors" in problems
    assert "puts b in 2.safetensors, which does not have it" in problems
    assert "3.safetensors declares" in problems
    assert "4.safetensors is missing" in problems
    assert "'../5.safetensors', which is not a plain file name" in problems


def test_tensor_that_the_index_leaves_out(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", GOOD)
    index_file(tmp_path, {"a": "1.safetensors"})
    (problem,) = CheckpointIndex.read(tmp_path).problems
    assert "has b, which" in problem


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}']
)
def test_bad_index_file(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        CheckpointIndex.read(tmp_path)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        CheckpointIndex.read(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no safetensors"):
        CheckpointIndex.read(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pickle files only \(pytorch_model.bin\)"):
        CheckpointIndex.read(tmp_path)


def test_directory_that_cannot_be_read() -> None:
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        CheckpointIndex.read("x" * 1000)


def test_shards_without_an_index(tmp_path: Path) -> None:
    write(tmp_path / "part-1.safetensors", one_tensor("a"))
    assert set(CheckpointIndex.read(tmp_path).entries) == {"a"}
    write(tmp_path / "part-2.safetensors", one_tensor("b"))
    with pytest.raises(CheckpointError, match="2 safetensors files but no"):
        CheckpointIndex.read(tmp_path)
