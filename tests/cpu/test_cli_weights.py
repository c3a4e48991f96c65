"""`metainfer weights synth` and `weights check` as commands, and what stopping them leaves."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from metainfer.arch.manifest import total_bytes
from metainfer.arch.tiny import tiny_arch, tiny_config
from metainfer.weights.index import INDEX_NAME, SINGLE_NAME
from tests.fakes.command import metainfer
from tests.fakes.tiny_tokenizer import write_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written_config(tmp_path / "config" / "config.json")


@pytest.fixture
def checkpoint(tmp_path: Path, config: Path) -> Path:
    assert metainfer("weights", "synth", str(tmp_path / "m"), "--config", str(config)).code == 0
    return tmp_path / "m"


def written_config(path: Path, **changes: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(tiny_config(**changes)), encoding="utf-8")
    return path


def test_synth_writes_what_check_accepts(tmp_path: Path, config: Path) -> None:
    target = tmp_path / "deep" / "model"
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    (tokenizer / "generation_config.json").write_text('{"thinking": false}', encoding="utf-8")
    ran = metainfer(
        *("weights", "synth", str(target), "--config", str(config), "--seed", "3"),
        *("--max-shard-bytes", "100K", "--tokenizer", str(tokenizer)),
    )
    assert (ran.code, ran.out) == (0, f"{target}\n")
    names = {path.name for path in target.iterdir()}
    assert names >= {INDEX_NAME, "config.json", *(path.name for path in tokenizer.iterdir())}
    ran = metainfer("weights", "check", str(target), "--deep")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-1].endswith("read and sound")
    report = json.loads(metainfer("weights", "check", str(target), "--json").out)
    assert (report["ok"], report["num_bytes"]) == (True, total_bytes(tiny_arch()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "no-such-model"], "there is no model at 'no-such-model'"),
        (["--tokenizer", "/nowhere"], "/nowhere/tokenizer.json does not exist"),
        (["--max-shard-bytes", "0"], "--max-shard-bytes must be at least 1"),
    ],
)
def test_synth_refuses_before_it_writes(arguments: list[str], words: str, tmp_path: Path) -> None:
    ran = metainfer("weights", "synth", str(tmp_path / "new" / "model"), *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert list(tmp_path.iterdir()) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lie_about_the_header(path: Path) -> None:
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])


def change_header(path: Path, change: Callable[[str], str]) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = change(data[8:end].decode()).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def overlap(path: Path) -> None:
    """Let the last tensor begin where the one before it does."""

    def change(text: str) -> str:
        header = json.loads(text)
        header.pop("__metadata__")
        *_, before, last = sorted(header.values(), key=lambda entry: entry["data_offsets"])
        start = before["data_offsets"][0]
        size = last["data_offsets"][1] - last["data_offsets"][0]
        last["data_offsets"] = [start, start + size]
        return json.dumps(header)

    change_header(path, change)


def name_twice(path: Path) -> None:
    def change(text: str) -> str:
        name = '"norm.weight":'
        start = text.index(name)
        stop = text.index("}", start) + 1
        return text[:start] + text[start:stop] + "," + text[start:]

    change_header(path, change)


def store_as_integers(path: Path) -> None:
    tensors = load_file(path)
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int32)
    save_file(tensors, path)


def drop_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["norm.weight"]
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (truncate, "truncated or damaged"),
        (lie_about_the_header, "declares a header of 1099511627776 bytes"),
        (overlap, "overlaps with"),
        (name_twice, "the key 'norm.weight' appears twice"),
        (store_as_integers, "norm.weight is I32, not F32"),
        (drop_a_tensor, "missing: norm.weight"),
        (Path.unlink, "file:"),
    ],
)
def test_check_names_what_is_wrong_with_a_file(
    spoil: Callable[[Path], object], words: str, checkpoint: Path
) -> None:
    spoil(checkpoint / SINGLE_NAME)
    for more in ([], ["--deep"]):
        ran = metainfer("weights", "check", str(checkpoint), *more)
        assert (ran.code, ran.err) == (1, "")
        assert words in ran.out
    report = json.loads(metainfer("weights", "check", str(checkpoint), "--json").out)
    assert report["ok"] is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": None, "index_topk": None}, "missing keys: head_dim, index_topk"),
        ({"rotary_wobble": 2}, "that could change the result: rotary_wobble"),
        ({"scoring_func": "sigmoid"}, "only 'sqrtsoftplus' is handled"),
    ],
)
def test_check_names_what_is_wrong_with_a_config(
    changes: dict[str, object], words: str, checkpoint: Path
) -> None:
    written_config(checkpoint / "config.json", **changes)
    ran = metainfer("weights", "check", str(checkpoint))
    assert (ran.code, ran.err) == (1, "")
    assert words in " ".join(ran.out.split())


def test_check_of_shards(tmp_path: Path, config: Path) -> None:
    shards = ("--max-shard-bytes", "100K")
    metainfer("weights", "synth", str(tmp_path / "m"), "--config", str(config), *shards)
    first, second, *_ = sorted((tmp_path / "m").glob("*.safetensors"))
    first.unlink()
    second.write_bytes(b"")
    ran = metainfer("weights", "check", str(tmp_path / "m"))
    assert ran.code == 1
    assert f"{first.name} is missing" in ran.out
    assert f"{second.name} has 0 bytes, too few for a header" in ran.out


def test_check_of_nothing(tmp_path: Path) -> None:
    ran = metainfer("weights", "check", str(tmp_path / "nowhere"))
    assert (ran.code, ran.err) == (1, "")
    assert "there is no" in ran.out


# ---- stopped while writing


def synth(target: Path, config: Path, **how: object) -> subprocess.Popen[str]:
    """The command in a process of its own, with files of 4 MiB."""
    command = [sys.executable, "-m", "metainfer", "weights", "synth", str(target)]
    return subprocess.Popen(
        [*command, "--config", str(config), "--max-shard-bytes", "4M"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,  # type: ignore[call-overload]
    )


def test_a_write_that_the_system_refuses_leaves_nothing(tmp_path: Path) -> None:
    config = written_config(tmp_path / "config" / "config.json", vocab_size=50_000)
    target = tmp_path / "out" / "model"
    process = synth(
        target,
        config,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)),
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert f"error: the checkpoint {target} could not be written: File too large" in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


def test_ctrl_c_while_writing_leaves_nothing(tmp_path: Path) -> None:
    config = written_config(tmp_path / "config" / "config.json", vocab_size=8_000_000)
    process = synth(tmp_path / "model", config)
    while process.poll() is None and not list(tmp_path.glob(".model.partial-*/*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A process that writes 200 MB holds little more than one that writes next to nothing."""
    peaks = []
    for vocab_size in (512, 400_000):
        config = written_config(tmp_path / "config" / "config.json", vocab_size=vocab_size)
        program = (
            "import sys\n"
            "from metainfer.bench.worker import peak_memory_bytes\n"
            "from metainfer.arch.families import read_arch\n"
            "from metainfer.weights.synth import write_checkpoint\n"
            "write_checkpoint(sys.argv[1], read_arch(sys.argv[2]))\n"
            "print(peak_memory_bytes())\n"
        )
        target = tmp_path / str(vocab_size)
        command = [sys.executable, "-c", program, str(target), str(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
        written = sum(path.stat().st_size for path in target.iterdir())
    assert written > 200e6
    assert peaks[1] - peaks[0] < 100e6


def test_the_shipped_model_is_found_by_name_unless_a_path_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = metainfer("weights", "check", "pebble")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == metainfer("weights", "check").out
    (tmp_path / "pebble").mkdir()
    ran = metainfer("weights", "check", "pebble")
    assert ran.code == 1
    assert "pebble has no config.json" in ran.out
