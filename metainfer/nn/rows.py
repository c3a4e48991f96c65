"""Rows on their way into products: as they are, as e4m3 codes with scales, or both."""

from __future__ import annotations

from typing import NamedTuple

import torch

from metainfer.nn.builder import LayerBuilder
from metainfer.ops.norm import RmsNormCase, RmsNormFp8Case
from metainfer.ops.quantise import QuantiseFp8Case


class Rows(NamedTuple):
    """T rows of width I; what nobody reads is None.

    Attributes:
        plain_TI: in the compute dtype.
        codes_TI: uint8, e4m3.
        scales_TG: uint8 (e8m0) or fp32, one for each group of channels.
    """

    plain_TI: torch.Tensor | None = None
    codes_TI: torch.Tensor | None = None
    scales_TG: torch.Tensor | None = None

    @property
    def plain(self) -> torch.Tensor:
        assert self.plain_TI is not None, "these rows were made as codes alone"
        return self.plain_TI

    @property
    def coded(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.codes_TI is not None, "these rows were not rounded"
        assert self.scales_TG is not None
        return self.codes_TI, self.scales_TG

    def part(self, rows: slice) -> Rows:
        """Some of the rows."""
        return Rows(*(None if tensor is None else tensor[rows] for tensor in self))


def rounds(build: LayerBuilder, width: int) -> bool:
    """Whether rows of `width` are rounded before products with quantised matrices."""
    return build.rounding is not None and width % build.rounding.group == 0


class RmsNorm:
    """x_TD -> Rows of x / rms(x) * weight.

    Args:
        plain, coded: as what the rows are read; `coded` only where `rounds` says so.
    """

    def __init__(
        self, build: LayerBuilder, prefix: str, *, plain: bool = True, coded: bool = False
    ) -> None:
        self._weight_D = build.norm_weight(prefix)
        self._plain, self._coded = plain, coded
        width, eps = len(self._weight_D), build.arch.rms_norm_eps
        if coded:
            assert build.rounding is not None
            case = RmsNormFp8Case(width, eps, *build.rounding, normed=plain, dtype=build.dtype)
            self._run = build.kernel("norm.rms_norm_fp8", case)
        else:
            self._run = build.kernel("norm.rms_norm", RmsNormCase(width, eps, build.dtype))

    def __call__(self, x_TD: torch.Tensor) -> Rows:
        if not self._coded:
            return Rows(self._run(x_TD, self._weight_D))
        codes_TD, scales_TG, *normed = self._run(x_TD, None, self._weight_D)
        return Rows(normed[0] if self._plain else None, codes_TD, scales_TG)


class Rounded:
    """x_TI in the compute dtype -> its Rows, as codes where `coded`."""

    def __init__(self, build: LayerBuilder, width: int, *, coded: bool) -> None:
        self._run = None
        if coded:
            assert build.rounding is not None
            case = QuantiseFp8Case(1, width, *build.rounding, dtype=build.dtype)
            self._run = build.kernel("quantise.fp8", case)

    def __call__(self, x_TI: torch.Tensor) -> Rows:
        if self._run is None:
            return Rows(x_TI)
        return Rows(None, *self._run(x_TI.unsqueeze(1), None))
