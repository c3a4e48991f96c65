"""Writes trained weights as a checkpoint in the released layout: fp8, fp4 and bf16 tensors.

    python export.py --config config.json --weights DIR --out CHECKPOINT

DIR holds the parts that train.py wrote. CHECKPOINT must not exist. Codes and scales come from the
engine's own encoders, which follow the rule that quantise.py simulates.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from metainfer.arch.families import arch_from_config
from metainfer.arch.manifest import TensorSpec, iterate
from metainfer.core.dtypes import DType
from metainfer.weights.formats import encode_fp4_group, encode_fp8_block
from metainfer.weights.write import write_safetensors
from train import read_parts

SHARD_BYTES = 7_900_000


def flat_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacked experts `ffn.experts.w1` [E, O, I] -> `ffn.experts.N.w1.weight` [O, I]."""
    out = {}
    for name, tensor in weights.items():
        if "ffn.experts." in name:
            head, _, which = name.rpartition(".")
            out |= {f"{head}.{n}.{which}.weight": one for n, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def stored(spec: TensorSpec, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that the file holds under `spec`."""
    if spec.name.endswith(".scale"):
        weight = tensors[spec.name.removesuffix(".scale") + ".weight"]
        fp4 = "ffn.experts." in spec.name
        return encode_fp4_group(weight).scale_OG if fp4 else encode_fp8_block(weight).scale
    weight = tensors[spec.name]
    if spec.dtype is DType.I8:
        return encode_fp4_group(weight).packed_OI2
    if spec.dtype is DType.F8_E4M3:
        return encode_fp8_block(weight).codes_OI
    plain = {DType.BF16: torch.bfloat16, DType.F32: torch.float32, DType.I64: torch.int64}
    return weight.to(plain[spec.dtype])


def export(config_file: Path, weights_folder: Path, out: Path, dense: bool) -> None:
    """Write the checkpoint `out`, which must not exist: in released formats, or bf16 throughout."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if dense:
        del config["quantization_config"], config["expert_dtype"]
    weights, buffers = read_parts(weights_folder)
    tensors = flat_names(weights) | buffers
    specs = list(iterate(arch_from_config(config, out.name)))

    def chunks(spec: TensorSpec) -> Iterator[torch.Tensor]:
        yield stored(spec, tensors)

    write_safetensors(out, specs, chunks, config, max_shard_bytes=SHARD_BYTES)
    print(f"{out}: {sum(spec.nbytes for spec in specs)} bytes in {len(specs)} tensors")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("config", "weights", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--dense", action="store_true", help="bf16 throughout, to compare with")
    args = parser.parse_args()
    export(args.config, args.weights, args.out, args.dense)


if __name__ == "__main__":
    main()
