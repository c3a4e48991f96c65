"""Random checkpoints: values, reproducibility, and what is left behind when writing fails."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from metainfer.arch.families import read_arch
from metainfer.arch.manifest import TensorSpec, iterate, manifest, total_bytes
from metainfer.arch.record import Arch
from metainfer.arch.tiny import tiny_arch, tiny_config, tiny_quantised_arch, tiny_quantised_config
from metainfer.core.dtypes import DType
from metainfer.core.errors import CheckpointError, UserError
from metainfer.weights import write as write_module
from metainfer.weights.index import INDEX_NAME, SINGLE_NAME
from metainfer.weights.load import Checkpoint
from metainfer.weights.synth import RandomTensors, write_checkpoint
from metainfer.weights.write import write_safetensors
from tests.fakes.interrupts import interrupted_at


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("synth") / "model"
    write_checkpoint(directory, tiny_quantised_arch(), seed=9, max_shard_bytes=10**6)
    return Checkpoint.open(directory, read_arch(directory))


def drawn(arch: Arch, spec: TensorSpec, seed: int) -> torch.Tensor:
    """One tensor, as `write_checkpoint` writes it; fp4 codes and e8m0 bytes as uint8."""
    return torch.cat(list(RandomTensors(arch, seed).pieces(spec))).view(spec.shape)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_any_tensor_can_be_drawn_alone(quantised: Checkpoint) -> None:
    for spec in iterate(quantised.arch):
        alone = drawn(quantised.arch, spec, seed=9)
        stored = quantised.tensor(spec.name)
        assert alone.shape == stored.shape
        assert torch.equal(
            alone.reshape(-1).view(torch.uint8), stored.reshape(-1).view(torch.uint8)
        ), spec.name


def test_config_is_vendor_style(quantised: Checkpoint, tmp_path: Path) -> None:
    config = json.loads((quantised.index.directory / "config.json").read_text())
    assert config["model_type"] == "deepseek_v4"
    assert config["quantization_config"]["scale_fmt"] == "ue8m0"
    given = tiny_config()
    written = write_checkpoint(tmp_path / "given", given)
    assert json.loads((written / "config.json").read_text()) == given


def test_shards_and_index(quantised: Checkpoint) -> None:
    directory = quantised.index.directory
    index = json.loads((directory / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == total_bytes(quantised.arch)
    assert index["weight_map"].keys() == manifest(quantised.arch).keys()
    assert len(quantised.index.paths) > 5
    large = {path for path in quantised.index.paths if path.stat().st_size > 1.1e6}
    held = [sum(e.path == path for e in quantised.index.entries.values()) for path in large]
    assert all(count == 1 for count in held)  # one tensor alone may be larger than a shard


def test_the_seed_decides(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "1", tiny_config(), seed=1)
    again = write_checkpoint(tmp_path / "2", tiny_config(), seed=1)
    other = write_checkpoint(tmp_path / "3", tiny_config(), seed=2)
    assert files_of(first) == files_of(again)
    assert files_of(first)[SINGLE_NAME] != files_of(other)[SINGLE_NAME]


@pytest.mark.parametrize("arch", [tiny_arch(), tiny_quantised_arch()], ids=["plain", "quantised"])
def test_values_keep_activations_in_size(arch: Arch, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", arch), arch)
    prefixes = ["attn.wq_b", "attn.wo_a", "attn.wo_b", "attn.indexer.wq_b", "ffn.experts.0.w2"]
    for prefix in prefixes:
        weight = checkpoint.weight(f"layers.2.{prefix}").dequantise(torch.float32)
        assert abs(weight.std() * math.sqrt(weight.shape[1]) - 1) < 0.3, prefix
        assert abs(weight.mean()) < 0.1 * weight.std()
        assert weight.unique().numel() > 10
    spread = {
        "embed.weight": (0, 1),
        "layers.2.attn_norm.weight": (1, 0.1),
        "layers.2.attn.compressor.ape": (0, 0.3),
        "layers.2.attn.attn_sink": (0, 0.3),
        "layers.2.hc_attn_base": (0, 0.3),
        "layers.2.hc_attn_fn": (0, (arch.hc_mult * arch.hidden_size) ** -0.5),
        "layers.2.ffn.gate.bias": (0, 0.1),
    }
    for name, (mean, std) in spread.items():
        values = checkpoint.tensor(name, torch.float32)
        error = 5 * std / math.sqrt(values.numel())
        assert abs(values.mean() - mean) < error, name
        assert 0.3 * std < values.std() < 1.8 * std, name


def test_scales_differ_between_blocks(quantised: Checkpoint) -> None:
    assert quantised.tensor("layers.2.attn.indexer.wq_b.scale").unique().numel() == 2
    assert quantised.tensor("layers.2.ffn.experts.0.w1.scale").unique().numel() == 2


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (8, 8), (7, 3)])
def test_hash_tables_are_spread_over_distinct_experts(experts: int, chosen: int) -> None:
    arch = tiny_arch(n_routed_experts=experts, num_experts_per_tok=chosen)
    table = drawn(arch, manifest(arch)["layers.0.ffn.gate.tid2eid"], seed=0)
    assert table.dtype is torch.int64
    assert table.shape == (512, chosen)
    assert all(row.unique().numel() == chosen for row in table)
    counts = torch.bincount(table.flatten(), minlength=experts)
    assert counts.shape == (experts,)
    assert counts.min() > 0.6 * counts.float().mean()


def test_pieces_are_bounded() -> None:
    source = RandomTensors(tiny_arch(), seed=0)
    spec = TensorSpec("embed.weight", DType.BF16, (3000, 4096))
    sizes = [piece.numel() for piece in source.pieces(spec)]
    assert sum(sizes) == 3000 * 4096
    assert max(sizes) <= 4 * 2**20
    assert len(sizes) > 2


def test_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_checkpoint(tmp_path / "m", tiny_arch(), progress=lambda *call: calls.append(call))
    assert calls[-1] == (total_bytes(tiny_arch()),) * 2
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


# ---- all or nothing


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        write_checkpoint(tmp_path, tiny_arch())
    assert files_of(tmp_path) == {"notes.txt": b"mine"}
    with pytest.raises(UserError, match="not empty"):
        write_checkpoint(tmp_path / "notes.txt", tiny_arch())


def test_an_empty_or_new_directory_is_filled(tmp_path: Path) -> None:
    for target in (tmp_path / "new" / "deep", tmp_path / "empty"):
        if target.name == "empty":
            target.mkdir()
        assert write_checkpoint(target, tiny_arch()) == target
        Checkpoint.open(target, tiny_arch())
        assert [path.name for path in target.parent.iterdir() if "partial" in path.name] == []


def test_no_room_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")(1000)
    monkeypatch.setattr(write_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="needs 0.00 GB, but"):
        write_checkpoint(tmp_path / "model", tiny_arch())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(OSError(28, "No space left on device"), UserError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_left_when_writing_stops(
    tmp_path: Path, workers: int, failure: BaseException, expected: type[BaseException]
) -> None:
    def pieces(spec: TensorSpec) -> Iterator[torch.Tensor]:
        yield torch.zeros(spec.shape)
        if spec.name == "b":
            raise failure

    specs = [TensorSpec(name, DType.F32, (100,)) for name in "abc"]
    with pytest.raises(expected) as caught:
        write_safetensors(
            tmp_path / "model", specs, pieces, {}, max_shard_bytes=400, workers=workers
        )
    assert list(tmp_path.iterdir()) == []
    if isinstance(caught.value, UserError):
        assert "No space left on device" in caught.value.message


def test_ctrl_c_at_any_moment_leaves_all_or_nothing(tmp_path: Path) -> None:
    specs = [TensorSpec(name, DType.F32, (100,)) for name in "abcd"]

    def write() -> None:
        write_safetensors(
            tmp_path / "model", specs, lambda spec: [torch.zeros(spec.shape)], {},
            max_shard_bytes=400, workers=2,
        )  # fmt: skip

    before = threading.active_count()
    for number in count(1, 101):
        try:
            if not interrupted_at(number, write):
                break
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail(f"SIGINT at event {number} was lost")
        assert threading.active_count() == before, number
        for path in tmp_path.iterdir():
            assert path.name == "model", number
            assert len(files_of(path)) == len(specs) + 2, number
            shutil.rmtree(path)
    assert number > 300


def test_workers_write_the_same_files(tmp_path: Path) -> None:
    arch = tiny_arch()
    specs = list(iterate(arch))
    seen: list[tuple[int, int]] = []
    for workers in (1, 3):
        write_safetensors(
            tmp_path / str(workers), specs, RandomTensors(arch, 0).pieces, {},
            max_shard_bytes=2**16, progress=lambda *told: seen.append(told), workers=workers,
        )  # fmt: skip
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(files) > 5
    for name in files:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()
    total = sum(spec.nbytes for spec in specs)
    assert seen.count((total, total)) == 2
    assert sorted(seen[len(seen) // 2 :]) == seen[len(seen) // 2 :]


def test_two_writers_of_one_target_do_not_disturb_each_other(tmp_path: Path) -> None:
    # Each writer has a directory of its process: the first one here is that of another one.
    other = tmp_path / ".model.partial-1"
    other.mkdir()
    held = os.open(other, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    write_checkpoint(tmp_path / "model", tiny_arch())
    assert other.is_dir()
    os.close(held)
    write_checkpoint(tmp_path / "mode", tiny_arch())
    assert other.is_dir()  # of another target


def test_a_real_full_disk(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError, match="No space left"), full.open("wb") as file:
        piece = torch.zeros(10**6)
        spec = TensorSpec("a", DType.F32, (10**6,))
        write_module._write_tensor(file, spec, [piece], lambda nbytes: None)


def test_pieces_that_do_not_fill_a_tensor(tmp_path: Path) -> None:
    specs = [TensorSpec("a", DType.F32, (100,))]
    with pytest.raises(ValueError, match="a: 396 bytes were given for 400"):
        write_safetensors(tmp_path / "model", specs, lambda spec: [torch.zeros(99)], {})
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_is_not_handled(tmp_path: Path) -> None:
    config = tiny_quantised_config(scoring_func="sigmoid")
    with pytest.raises(CheckpointError, match="scoring_func"):
        write_checkpoint(tmp_path / "model", config)
    assert list(tmp_path.iterdir()) == []
