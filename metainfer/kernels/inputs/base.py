"""Calls of ops with random inputs: what tests, verification, benchmarks and coverage run.

Numbers are seeded: the same draws give the same numbers, in memory of their own. On the device
"meta" there are shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16}
)


@dataclass(frozen=True)
class Call:
    """One call of an op: what `prepare` and what `run` take after the case."""

    weights: tuple[Any, ...]
    arguments: tuple[Any, ...]


class Draw:
    """Seeded random tensors on one device.

    Numbers are made on the CPU and copied, so that devices can be compared; with `in_place` they
    are made where they are wanted, which large inputs need.

    Attributes:
        cache_dtype: of caches that hold plain numbers; "" for that of the case.
    """

    def __init__(
        self, seed: int, device: str = "cpu", in_place: bool = False, cache_dtype: str = ""
    ) -> None:
        self.device = device
        self.cache_dtype = cache_dtype
        self.shapes_only = device == "meta"
        self._made_on = device if in_place or self.shapes_only else "cpu"
        self._generator = None
        if not self.shapes_only:
            self._generator = torch.Generator(self._made_on).manual_seed(seed)

    def normal(self, *shape: int, dtype: str = "float32", scale: float = 1.0) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self._generator, device=self._made_on)
        return numbers.mul_(scale).to(self.device, DTYPES[dtype])

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """From low to high - 1. Weights of all experts are drawn as bytes: as int64 they would take
        more memory than all else."""
        return torch.randint(
            low, high, shape, generator=self._generator, device=self._made_on, dtype=dtype
        ).to(self.device)

    def distinct(self, rows: int, count: int, below: int) -> torch.Tensor:
        """int64 [rows, count], different integers below `below` in each row, in any order."""
        numbers = torch.rand(rows, below, generator=self._generator, device=self._made_on)
        return numbers.argsort(dim=1)[:, :count].contiguous().to(self.device)

    def spread(self, rows: int, count: int, below: int) -> torch.Tensor:
        """As `distinct`, in ascending order, one out of each of `count` equal parts: what large
        inputs can afford."""
        edges = torch.arange(count + 1, device=self._made_on) * below // max(count, 1)
        share = torch.rand(rows, count, generator=self._generator, device=self._made_on)
        return (edges[:-1] + (share * edges.diff()).long()).to(self.device)

    def rotation(self, rows: int, width: int) -> torch.Tensor:
        angle = self.normal(rows, width // 2, scale=3.0)
        return torch.stack([angle.cos(), angle.sin()], dim=-1)

    def fp8(self, *shape: int) -> torch.Tensor:
        """Every finite e4m3 code, subnormals and both zeros included."""
        magnitudes = self.integers(0, 127, *shape, dtype=torch.uint8)
        signs = self.integers(0, 2, *shape, dtype=torch.uint8).mul_(128)
        return magnitudes.add_(signs).view(torch.float8_e4m3fn)

    def scales(self, *shape: int, kind: str = "e8m0", middle: int = 119) -> torch.Tensor:
        """Scales around 2^(middle - 127), as bytes or as fp32 that are no powers of two."""
        if kind == "e8m0":
            return self.integers(middle - 3, middle + 3, *shape, dtype=torch.uint8)
        return self.normal(*shape, scale=0.3).exp() * 2.0 ** (middle - 127)


def apart(dense: torch.Tensor) -> torch.Tensor:
    """The same numbers with garbage between the rows."""
    gap = torch.full((len(dense), 8, *dense.shape[2:]), torch.nan, device=dense.device)
    return torch.cat([gap.to(dense.dtype), dense, gap.to(dense.dtype)], dim=1)[:, 8:-8]


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def garbage_but(listed: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """NaN in every row of a cache that no list names: as bytes 255, which every format reads so."""
    named = torch.zeros(len(cache), dtype=torch.bool, device=cache.device)
    named[listed[listed >= 0]] = True
    cache[~named] = 255 if cache.dtype is torch.uint8 else torch.nan
    return cache
