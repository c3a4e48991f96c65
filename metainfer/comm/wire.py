"""Wires: in which form numbers travel.

Whoever sums decodes what others decode, its own numbers too, so that all ranks have the same sums.
The 8-bit forms share a scale among 128 numbers that lie in one row, so that a tensor sent in pieces
arrives as the whole would. They lose accuracy: a plan takes them where the model's quality gate
passed with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from metainfer.core.errors import MetainferError
from metainfer.plan.wires import BLOCK, PLAIN, WIRES

_SCALE_BYTES = 4


class Wire(Protocol):
    """Attributes:
    unit: numbers that can only travel together.
    unit_bytes: of them.
    wide: in which sums are made.
    """

    @property
    def unit(self) -> int: ...

    @property
    def unit_bytes(self) -> int: ...

    @property
    def wide(self) -> torch.dtype: ...

    def encode(self, values_N: torch.Tensor) -> torch.Tensor:
        """uint8: the bytes of whole units."""

    def decode(self, bytes_B: torch.Tensor) -> torch.Tensor:
        """[N] of what `encode` gave; the memory may be that of `bytes_B`."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers as they are.

    Attributes:
        dtype: theirs.
    """

    dtype: torch.dtype
    unit: int = 1

    @property
    def unit_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def wide(self) -> torch.dtype:
        return torch.float32 if self.dtype.is_floating_point else torch.int64

    def encode(self, values_N: torch.Tensor) -> torch.Tensor:
        return values_N.to(self.dtype).view(torch.uint8)

    def decode(self, bytes_B: torch.Tensor) -> torch.Tensor:
        return bytes_B.view(self.dtype)


@dataclass(frozen=True, slots=True)
class EightBit:
    """Codes of 8 bits with an fp32 scale behind each block of them.

    Attributes:
        codes: `torch.int8` or `torch.float8_e4m3fn`.
    """

    codes: torch.dtype
    unit: int = BLOCK
    unit_bytes: int = BLOCK + _SCALE_BYTES
    wide: torch.dtype = torch.float32

    def encode(self, values_N: torch.Tensor) -> torch.Tensor:
        """Of a block that holds what is not finite, nothing that arrives is."""
        blocks_B128 = values_N.view(len(values_N) // BLOCK, BLOCK).float()
        largest = 127.0 if self.codes is torch.int8 else 448.0
        scale_B1 = blocks_B128.abs().amax(-1, keepdim=True) / largest
        scaled_B128 = blocks_B128 / torch.where(scale_B1 > 0, scale_B1, 1.0)
        scaled_B128 = scaled_B128.nan_to_num_(0.0).clamp_(-largest, largest)
        if self.codes is torch.int8:
            scaled_B128 = scaled_B128.round_()
        units = values_N.new_empty(len(blocks_B128), self.unit_bytes, dtype=torch.uint8)
        units[:, :BLOCK] = scaled_B128.to(self.codes).view(torch.uint8)
        units.view(torch.float32)[:, -1:] = scale_B1
        return units.view(-1)

    def decode(self, bytes_B: torch.Tensor) -> torch.Tensor:
        units = bytes_B.view(len(bytes_B) // self.unit_bytes, self.unit_bytes)
        scale_B1 = units[:, BLOCK:].contiguous().view(torch.float32)
        codes_B128 = units[:, :BLOCK].contiguous().view(self.codes)
        return (codes_B128.float() * scale_B1).view(-1)


def wire_of(name: str, tensor: torch.Tensor) -> Wire:
    """The wire that is called `name`, one of `plan.wires.WIRES`, for rows of `tensor`. Raises where
    those cannot travel so."""
    if name == PLAIN:
        return Plain(tensor.dtype)
    if name not in WIRES:
        raise MetainferError(f"there is no wire {name}, only {', '.join(WIRES)}")
    if not tensor.is_floating_point() or tensor.dim() == 0 or tensor.shape[-1] % BLOCK:
        raise MetainferError(
            f"{tensor.dtype} {list(tensor.shape)} cannot travel as {name}: rows must be of whole"
            f" blocks of {BLOCK} numbers"
        )
    return EightBit(torch.int8 if name == "int8" else torch.float8_e4m3fn)
