"""Random checkpoints of any Arch, in the released names and formats.

Every tensor is drawn from its name and the seed alone, so any one can be made again by itself.
Quantised matrices are drawn as codes and scales directly. Values are such that activations keep
their size through the network: matrices N(0, 1 / columns), embedding N(0, 1), norms and
hyper-connection scales near 1, sinks, position biases and bases N(0, 0.3^2), router biases
N(0, 0.1^2), hash tables with distinct experts evenly spread.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import SFC64, Generator  # at once: its import, which is lazy, swallows Ctrl-C

from metainfer.arch.deepseek_v4 import vendor_config
from metainfer.arch.families import arch_from_config
from metainfer.arch.manifest import TensorSpec, iterate
from metainfer.arch.record import Arch, WeightFormat
from metainfer.core.dtypes import DType
from metainfer.weights.formats.fp4_group import pack_e2m1
from metainfer.weights.formats.fp8_block import E4M3_LARGEST
from metainfer.weights.write import DEFAULT_SHARD_BYTES, Progress, write_safetensors

_PIECE_ELEMENTS = 4 * 2**20  # bounds memory: what is drawn of a tensor at once
_LEVELS = 2**16  # quantiles of the normal distribution that values are drawn from
_PAIR_LEVELS = 2**8  # as above, for each fp4 code of a byte

# Standard deviations of codes: large enough to use the format, small enough to clip rarely.
_FP8_SPREAD = 100.0
_FP4_SPREAD = 2.0
# Scales are drawn from 1 and 1/2 times a power of two, so that mixing them up shows; this is the
# root mean square of the two factors.
_SCALE_RMS = math.sqrt((1 + 0.25) / 2)


def write_checkpoint(
    directory: str | Path,
    arch_or_config: Arch | Mapping[str, Any],
    seed: int = 0,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    copies: Sequence[Path] = (),
) -> Path:
    """Write a random checkpoint with its config.json; see `weights.write` for what is promised.

    Args:
        directory: must not exist, or be empty.
        arch_or_config: an Arch, or a config.json's object, which is then written as it is.
        seed: another seed gives other tensors.
        max_shard_bytes: size of a file, at least one tensor.
        progress: called with (bytes written, bytes in all), from any thread.
        copies: files that go with it under their own names.

    Raises:
        UserError: the directory is not empty, there is no room, or writing fails.
        CheckpointError: the config is not handled.
    """
    if isinstance(arch_or_config, Arch):
        arch, config = arch_or_config, vendor_config(arch_or_config)
    else:
        config = dict(arch_or_config)
        arch = arch_from_config(config, Path(directory).name)
    source = RandomTensors(arch, seed)
    return write_safetensors(
        directory,
        list(iterate(arch)),
        source.pieces,
        config,
        max_shard_bytes=max_shard_bytes,
        copies=copies,
        progress=progress,
        workers=len(os.sched_getaffinity(0)),
    )


class RandomTensors:
    """Draws the tensors of one checkpoint; keeps the tables of values that it has built."""

    def __init__(self, arch: Arch, seed: int) -> None:
        self._arch = arch
        self._seed = seed
        self._tables: dict[tuple[object, ...], Table] = {}

    def pieces(self, spec: TensorSpec) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, flat, in pieces of bounded size."""
        digest = hashlib.sha256(f"{self._seed}:{spec.name}".encode()).digest()
        generator = Generator(SFC64(int.from_bytes(digest[:16], "little")))
        if spec.dtype is DType.I64:
            yield from self._expert_ids(generator, *spec.shape)
            return
        table = self.table(spec)
        elements = math.prod(spec.shape)
        for start in range(0, elements, _PIECE_ELEMENTS):
            count = min(_PIECE_ELEMENTS, elements - start)
            draws = generator.integers(0, len(table.stored), count, dtype=np.uint16)
            yield torch.from_numpy(table.stored[draws]).view(table.dtype)

    def table(self, spec: TensorSpec) -> Table:
        """The values of which one is drawn for each element."""
        build: partial[Table]
        if spec.name.endswith(".scale"):
            build = partial(_scale_table, spec.dtype, self._scale_exponent(spec))
        elif spec.dtype in (DType.F8_E4M3, DType.I8):
            build = partial(_code_table, spec.dtype, self._code_spread(spec))
        else:
            build = partial(_plain_table, spec.dtype, *_distribution(spec))
        key = (build.func.__name__, *build.args)
        if key not in self._tables:
            self._tables[key] = build()
        return self._tables[key]

    def _scale_exponent(self, spec: TensorSpec) -> int:
        """log2 of the larger scale of a matrix, from the shape of its scales."""
        quantisation = self._arch.quantisation
        routed = ".ffn.experts." in spec.name
        if routed and quantisation.experts is WeightFormat.FP4_GROUP:
            return _exponent(spec.shape[-1] * quantisation.fp4_group, _FP4_SPREAD)
        return _exponent(spec.shape[-1] * quantisation.fp8_block[1], _FP8_SPREAD)

    def _code_spread(self, spec: TensorSpec) -> float:
        """Standard deviation of a matrix's codes, which with its scales makes N(0, 1 / columns)."""
        if spec.dtype is DType.I8:
            columns, wanted = 2 * spec.shape[-1], _FP4_SPREAD
        else:
            block = self._arch.quantisation.fp8_block[1]
            columns, wanted = -(-spec.shape[-1] // block) * block, _FP8_SPREAD
        return columns**-0.5 / (_SCALE_RMS * 2.0 ** _exponent(columns, wanted))

    def _expert_ids(self, generator: Generator, rows: int, per_row: int) -> Iterator[torch.Tensor]:
        """Rows of distinct experts: a random start, then random steps that together stay below
        one round."""
        num_experts = self._arch.num_experts
        rows_per_piece = max(1, _PIECE_ELEMENTS // per_row)
        for start in range(0, rows, rows_per_piece):
            count = min(rows_per_piece, rows - start)
            steps = generator.integers(1, num_experts // per_row + 1, (count, per_row))
            steps[:, 0] = generator.integers(0, num_experts, count)
            yield torch.from_numpy(np.cumsum(steps, axis=1) % num_experts).flatten()


class Table(NamedTuple):
    """Evenly likely values."""

    stored: np.ndarray  # values, seen as integers or floats of their size
    dtype: torch.dtype  # what they are


def _distribution(spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of a tensor that is not quantised."""
    name = spec.name
    if name.endswith(("norm.weight", "_scale")):
        return 1.0, 0.1
    if name.endswith(("attn_sink", ".ape", "_base")):
        return 0.0, 0.3
    if name.endswith("gate.bias"):
        return 0.0, 0.1
    if name == "embed.weight":
        return 0.0, 1.0
    return 0.0, spec.shape[-1] ** -0.5


def _exponent(columns: int, spread: float) -> int:
    """log2 of the scale at which codes of about `spread` make weights of variance 1 / columns."""
    return round(math.log2(columns**-0.5 / (spread * _SCALE_RMS)))


def _plain_table(dtype: DType, mean: float, spread: float) -> Table:
    values = mean + spread * _quantiles(_LEVELS)
    if dtype is DType.F32:
        return Table(values.numpy(), torch.float32)
    return Table(values.to(torch.bfloat16).view(torch.int16).numpy(), torch.bfloat16)


def _code_table(dtype: DType, spread: float) -> Table:
    if dtype is DType.F8_E4M3:
        values = (spread * _quantiles(_LEVELS)).clamp(-E4M3_LARGEST, E4M3_LARGEST)
        codes = values.to(torch.float8_e4m3fn)
        return Table(codes.view(torch.uint8).numpy(), torch.float8_e4m3fn)
    values = spread * _quantiles(_PAIR_LEVELS)
    pairs = torch.stack(torch.meshgrid(values, values, indexing="ij"), dim=-1)
    return Table(pack_e2m1(pairs.flatten()).numpy(), torch.uint8)


def _scale_table(dtype: DType, exponent: int) -> Table:
    if dtype is DType.F32:
        largest = 2.0**exponent
        return Table(np.linspace(largest / 2, largest, _LEVELS, dtype=np.float32), torch.float32)
    return Table(np.array([exponent + 127, exponent + 126], dtype=np.uint8), torch.uint8)


def _quantiles(count: int) -> torch.Tensor:
    """fp32 [count]: evenly likely values of the standard normal distribution."""
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.special.ndtri(middles).to(torch.float32)
