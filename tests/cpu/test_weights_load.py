"""Checkpoint: what is read, which slices each rank reads, and what is refused before reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from metainfer.arch.families import arch_from_config, read_arch
from metainfer.arch.manifest import iterate, manifest
from metainfer.arch.record import Arch
from metainfer.arch.split import rank_shape, split_dimension
from metainfer.arch.tiny import tiny_arch, tiny_config, tiny_quantised_arch, tiny_quantised_config
from metainfer.core.errors import CheckpointError, UserError
from metainfer.weights.formats import DenseWeight, Fp4GroupWeight, Fp8BlockWeight
from metainfer.weights.index import INDEX_NAME, SINGLE_NAME
from metainfer.weights.load import Checkpoint
from metainfer.weights.synth import write_checkpoint

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", tiny_config(), seed=5)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantised") / "model"
    return write_checkpoint(directory, tiny_quantised_config(), seed=5, max_shard_bytes=2**20)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def all_tensors(directory: Path) -> Tensors:
    """The checkpoint as the safetensors library reads it."""
    tensors: Tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def changed(directory: Path, target: Path, change: Callable[[Tensors], Any]) -> Path:
    """A copy of the checkpoint, in one file, with some tensors changed."""
    tensors = {name: tensor.clone() for name, tensor in all_tensors(directory).items()}
    change(tensors)
    target.mkdir()
    save_file(tensors, target / SINGLE_NAME)
    (target / "config.json").write_text((directory / "config.json").read_text())
    return target


def refusal(directory: Path, arch: Arch) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory, arch)
    return caught.value


@pytest.mark.parametrize("which", ["tiny", "quantised"])
def test_every_tensor_is_what_the_safetensors_library_reads(
    which: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(which)
    arch = read_arch(directory)
    reference = all_tensors(directory)
    assert reference.keys() == manifest(arch).keys()
    with Checkpoint.open(directory, arch) as checkpoint:
        for name, expected in reference.items():
            tensor = checkpoint.tensor(name)
            assert tensor.shape == expected.shape
            assert torch.equal(raw(tensor), raw(expected)), name
        assert checkpoint.tensor("norm.weight", torch.float64).dtype is torch.float64


def test_tensors_outlive_the_checkpoint(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny, tiny_arch())
    tensor = checkpoint.tensor("head.weight")
    again = checkpoint.tensor("head.weight")
    assert tensor.data_ptr() == again.data_ptr()  # mapped, not copied
    before = tensor.sum()
    checkpoint.close()
    assert tensor.sum() == before
    assert torch.equal(checkpoint.tensor("head.weight"), tensor)


def test_weights_keep_their_format(quantised: Path, tiny: Path) -> None:
    checkpoint = Checkpoint.open(quantised, tiny_quantised_arch())
    fp8 = checkpoint.weight("layers.2.attn.indexer.wq_b")
    assert isinstance(fp8, Fp8BlockWeight)
    assert fp8.shape == (64 * 128, 128)
    assert fp8.scale.dtype is torch.uint8
    assert isinstance(checkpoint.weight("layers.2.ffn.experts.3.w2"), Fp4GroupWeight)
    assert isinstance(checkpoint.weight("layers.2.ffn.gate"), DenseWeight)
    plain = Checkpoint.open(tiny, tiny_arch()).weight("layers.2.attn.wo_b")
    assert isinstance(plain, DenseWeight)
    assert plain.tensor.dtype is torch.float32
    with pytest.raises(CheckpointError, match="layers.9.attn.wo_b.weight"):
        checkpoint.weight("layers.9.attn.wo_b")


@pytest.mark.parametrize("which", ["tiny", "quantised"])
def test_stacked_experts_are_the_single_ones(which: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(which)
    checkpoint = Checkpoint.open(directory, read_arch(directory))
    ids = [5, 0, 7]
    stacks = checkpoint.experts("layers.3.ffn.experts", ids)
    for stack, matrix in zip(stacks, ("w1", "w2", "w3"), strict=True):
        assert stack.shape[0] == len(ids)
        for slot, expert in enumerate(ids):
            single = checkpoint.weight(f"layers.3.ffn.experts.{expert}.{matrix}")
            assert type(single) is type(stack)
            assert torch.equal(
                stack.expert(slot).dequantise(torch.float32), single.dequantise(torch.float32)
            )


@pytest.mark.parametrize("wrong", [-1, 8, 2**40])
def test_a_table_that_names_no_expert_is_refused(tiny: Path, tmp_path: Path, wrong: int) -> None:
    name = "layers.0.ffn.gate.tid2eid"
    assert Checkpoint.open(tiny, tiny_arch()).expert_table(name).shape == (512, 2)

    def spoil(tensors: Tensors) -> None:
        tensors[name][17, 1] = wrong

    checkpoint = Checkpoint.open(changed(tiny, tmp_path / "spoilt", spoil), tiny_arch())
    with pytest.raises(CheckpointError) as caught:
        checkpoint.expert_table(name)
    assert f"{name} names experts that do not exist in 1 places" in caught.value.message
    assert f"{wrong} of 8 for token 17" in caught.value.message


@pytest.mark.parametrize(
    ("table", "what"),
    [
        (torch.zeros(512, 2), "dtype: {} is F32, not I64"),
        (torch.zeros(512, 3, dtype=torch.int64), "shape: {} is [512, 3], not [512, 2]"),
        (torch.zeros(500, 2, dtype=torch.int64), "shape: {} is [500, 2], not [512, 2]"),
    ],
    ids=["float", "wide", "short"],
)
def test_a_table_of_another_form_is_refused_before_it_is_read(
    tiny: Path, tmp_path: Path, table: torch.Tensor, what: str
) -> None:
    name = "layers.0.ffn.gate.tid2eid"
    spoilt = changed(tiny, tmp_path / "spoilt", lambda tensors: tensors.update({name: table}))
    assert what.format(name) in refusal(spoilt, tiny_arch()).message


def test_mtp_is_reported_as_unused_and_may_be_absent(quantised: Path, tmp_path: Path) -> None:
    arch = tiny_quantised_arch()
    unused = Checkpoint.open(quantised, arch).unused
    assert set(unused) == {spec.name for spec in iterate(arch) if spec.name.startswith("mtp.")}

    def replace_mtp(tensors: Tensors) -> None:
        for name in unused:
            del tensors[name]
        tensors["mtp.2.markov_head.embed.weight"] = torch.zeros(3)

    other = changed(quantised, tmp_path / "other", replace_mtp)
    assert Checkpoint.open(other, arch).unused == ("mtp.2.markov_head.embed.weight",)


# ---- slices of ranks


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised checkpoint that 4 ranks can divide."""
    config = tiny_quantised_config(
        num_attention_heads=8,
        o_groups=4,
        moe_intermediate_size=512,
        n_routed_experts=2,
        num_hidden_layers=3,
        compress_ratios=[0, 4, 128],
        num_nextn_predict_layers=0,
    )
    return write_checkpoint(tmp_path_factory.mktemp("divisible") / "model", config, seed=1)


@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_all_ranks_make_the_whole(divisible: Path, size: int) -> None:
    arch = read_arch(divisible)
    whole = Checkpoint.open(divisible, arch)
    ranks = [Checkpoint.open(divisible, arch, rank=rank, size=size) for rank in range(size)]
    num_divided = 0
    for spec in iterate(arch):
        expected = whole.tensor(spec.name)
        slices = [rank.tensor(spec.name) for rank in ranks]
        assert all(s.shape == rank_shape(spec.name, spec.shape, size) for s in slices)
        dimension = split_dimension(spec.name)
        if dimension is None:
            assert all(torch.equal(raw(s), raw(expected)) for s in slices)
        else:
            num_divided += 1
            joined = torch.cat([s.view(torch.uint8) for s in slices], dim=dimension)
            assert torch.equal(joined.reshape(-1), raw(expected)), spec.name
    assert num_divided == arch.num_layers * (7 + 6 * (arch.num_experts + 1)) + 1


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose ranks have parts of blocks of scales."""
    config = tiny_quantised_config(
        head_dim=64,
        qk_rope_head_dim=32,
        o_groups=4,
        n_routed_experts=2,
        num_hidden_layers=3,
        compress_ratios=[0, 4, 128],
        num_nextn_predict_layers=0,
    )
    return write_checkpoint(tmp_path_factory.mktemp("narrow") / "model", config, seed=1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["divisible", "narrow"])
def test_slices_dequantise_to_slices(request: pytest.FixtureRequest, name: str, size: int) -> None:
    directory = request.getfixturevalue(name)
    arch = read_arch(directory)
    whole = Checkpoint.open(directory, arch)
    ranks = [Checkpoint.open(directory, arch, rank=rank, size=size) for rank in range(size)]
    for prefix, dimension in (
        ("layers.1.attn.wq_b", 0),
        ("layers.1.attn.wo_a", 0),
        ("layers.1.attn.wo_b", 1),
        ("layers.1.ffn.shared_experts.w2", 1),
        ("layers.1.ffn.shared_experts.w3", 0),
    ):
        expected = whole.weight(prefix).dequantise(torch.float32)
        parts = [rank.weight(prefix).dequantise(torch.float32) for rank in ranks]
        assert torch.equal(torch.cat(parts, dim=dimension), expected), prefix
    for stack, parts, dimension in zip(
        whole.experts("layers.2.ffn.experts", [1, 0]),
        zip(*(rank.experts("layers.2.ffn.experts", [1, 0]) for rank in ranks), strict=True),
        (1, 2, 1),
        strict=True,
    ):
        joined = torch.cat([part.dequantise(torch.float32) for part in parts], dim=dimension)
        assert torch.equal(joined, stack.dequantise(torch.float32))


def test_plain_matrices_are_divided_by_columns_too(tiny: Path) -> None:
    arch = tiny_arch()
    whole = Checkpoint.open(tiny, arch).tensor("layers.0.attn.wo_b.weight")
    parts = [
        Checkpoint.open(tiny, arch, rank=rank, size=2).tensor("layers.0.attn.wo_b.weight")
        for rank in range(2)
    ]
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_sizes_that_do_not_divide_are_refused_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="attention heads: 4 is not a multiple of 3"):
        Checkpoint.open(tmp_path / "nowhere", tiny_quantised_arch(), size=3)


# ---- formats that say themselves what they are


def test_fp32_scales_are_read_whatever_the_config_says(tmp_path: Path) -> None:
    config = tiny_quantised_config(expert_dtype="fp8")
    with_bytes = write_checkpoint(tmp_path / "bytes", config, seed=2)
    arch = read_arch(with_bytes)

    def to_float(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".scale"):
                tensors[name] = tensor.to(torch.float32)

    with_floats = Checkpoint.open(changed(with_bytes, tmp_path / "floats", to_float), arch)
    reference = Checkpoint.open(with_bytes, arch)
    for prefix in ("layers.0.attn.wq_a", "layers.2.ffn.experts.1.w2"):
        weight = with_floats.weight(prefix)
        assert isinstance(weight, Fp8BlockWeight)
        assert weight.scale.dtype is torch.float32
        expected = reference.weight(prefix).dequantise(torch.float32)
        assert torch.equal(weight.dequantise(torch.float32), expected)

    def mix(tensors: Tensors) -> None:
        name = "layers.2.ffn.experts.1.w2.scale"
        tensors[name] = tensors[name].to(torch.float32)

    mixed = changed(with_bytes, tmp_path / "mixed", mix)
    assert "layers.2.ffn.experts has both e8m0 and F32" in refusal(mixed, arch).message


def test_config_without_scale_fmt_writes_and_reads_fp32_scales(tmp_path: Path) -> None:
    config = tiny_quantised_config(expert_dtype="fp8")
    del config["quantization_config"]["scale_fmt"]
    directory = write_checkpoint(tmp_path / "model", config)
    weight = Checkpoint.open(directory, read_arch(directory)).weight("layers.0.attn.wkv")
    assert isinstance(weight, Fp8BlockWeight)
    assert weight.scale.dtype is torch.float32


def test_data_that_is_not_aligned(tiny: Path, tmp_path: Path) -> None:
    reference = all_tensors(tiny)
    directory = tmp_path / "odd"
    directory.mkdir()
    text, offset = {}, 0
    for name, tensor in reference.items():
        dtype = {torch.int64: "I64", torch.float32: "F32"}[tensor.dtype]
        stop = offset + tensor.nbytes
        text[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    header = json.dumps(text).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length: nothing is aligned
    data = b"".join(raw(tensor).numpy().tobytes() for tensor in reference.values())
    (directory / SINGLE_NAME).write_bytes(len(header).to_bytes(8, "little") + header + data)
    checkpoint = Checkpoint.open(directory, tiny_arch())
    for name in ("embed.weight", "layers.0.ffn.gate.tid2eid", "hc_head_scale"):
        assert torch.equal(checkpoint.tensor(name), reference[name])


# ---- broken checkpoints


def test_everything_that_is_wrong_is_listed_together(tiny: Path, tmp_path: Path) -> None:
    def break_it(tensors: Tensors) -> None:
        del tensors["layers.3.attn.wkv.weight"]
        del tensors["norm.weight"]
        tensors["layers.0.attn.q_proj.weight"] = torch.zeros(2)
        tensors["head.weight"] = torch.zeros(512, 32)
        tensors["hc_head_base"] = torch.zeros(4, dtype=torch.bfloat16)
        tensors["embed.weight"] = tensors["embed.weight"].half()

    broken = changed(tiny, tmp_path / "broken", break_it)
    message = refusal(broken, tiny_arch()).message
    for count in ("2 missing", "1 surplus", "1 shape", "2 dtype"):
        assert count in message.splitlines()[0]
    for line in (
        "missing: layers.3.attn.wkv.weight (F32 [32, 64])",
        "missing: norm.weight",
        "surplus: layers.0.attn.q_proj.weight",
        "shape: head.weight is [512, 32], not [512, 64]",
        "dtype: hc_head_base is BF16, not F32",
        "dtype: embed.weight is F16, not F32",
    ):
        assert line in message


def test_long_lists_are_cut(tiny: Path) -> None:
    message = refusal(tiny, tiny_quantised_arch()).message
    assert len(message.splitlines()) < 30
    assert "missing: and" in message


def test_wrong_torch_dtype_has_a_hint(tiny: Path) -> None:
    error = refusal(tiny, tiny_arch(torch_dtype="bfloat16"))
    assert "embed.weight is F32, not BF16" in error.message
    assert "torch_dtype" in (error.hint or "")


def test_names_of_transformers_have_a_hint(tiny: Path, tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    error = refusal(changed(tiny, tmp_path / "renamed", rename), tiny_arch())
    assert "transformers" in (error.hint or "")


def test_truncated_and_missing_shards(quantised: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in quantised.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    shards = sorted(copy.glob("*.safetensors"))
    assert len(shards) > 3
    shards[0].write_bytes(shards[0].read_bytes()[:-100])
    shards[1].unlink()
    error = refusal(copy, tiny_quantised_arch())
    assert f"{shards[0].name} declares" in error.message
    assert "truncated" in error.message
    assert f"{shards[1].name} is missing; {INDEX_NAME} puts" in error.message
    assert "fetch" in (error.hint or "")


def test_file_that_shrinks_after_it_was_checked(tiny: Path, tmp_path: Path) -> None:
    directory = changed(tiny, tmp_path / "shrinking", lambda tensors: None)
    checkpoint = Checkpoint.open(directory, tiny_arch())
    path = directory / SINGLE_NAME
    path.write_bytes(path.read_bytes()[: checkpoint.index.entries["head.weight"].start])
    with pytest.raises(CheckpointError, match="shorter"):
        checkpoint.tensor("head.weight")


def test_control_characters_in_names_do_not_reach_the_terminal(tiny: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["\x1b[31mred"] = torch.zeros(1)

    message = refusal(changed(tiny, tmp_path / "red", add), tiny_arch()).message
    assert "\x1b" not in message
    assert "red" in message


def test_arch_of_the_wrong_size(tiny: Path) -> None:
    arch = arch_from_config(tiny_config(hidden_size=96), "wider")
    assert "embed.weight is [512, 64], not [512, 96]" in refusal(tiny, arch).message
