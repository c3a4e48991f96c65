"""DenseWeight: a matrix stored as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix [O, I] in fp32 or bf16, or a stack [E, O, I]."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def expert(self, index: int) -> DenseWeight:
        """One matrix of a stack, sharing its memory."""
        return DenseWeight(self.tensor[index])

    def to(self, device: torch.device | str) -> DenseWeight:
        return DenseWeight(self.tensor.to(device))

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """[..., O, I] in `dtype`; the stored tensor itself where it has that dtype."""
        return self.tensor.to(dtype)
