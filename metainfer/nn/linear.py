"""Matrix products with weights in any stored format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from metainfer.nn.builder import LayerBuilder, weight_tensors
from metainfer.ops.linear import DenseCase, Fp8BlockCase, GroupedCase
from metainfer.weights.formats import DenseWeight, Fp8BlockWeight, Weight

Product = Callable[[torch.Tensor], torch.Tensor]  # x_TI -> y_TO


def linear(build: LayerBuilder, prefix: str) -> Product:
    """x_TI -> y_TO in the compute dtype, with the matrix `prefix`."""
    return _product(build, build.checkpoint.weight(prefix))


def dense_fp32(build: LayerBuilder, names: Sequence[str]) -> Product:
    """x_TI -> fp32 y_TO with plain matrices, stacked in one product."""
    tensors = [build.checkpoint.tensor(name) for name in names]
    weight_OI = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    rows, columns = weight_OI.shape
    case = DenseCase(rows, columns, build.dtype, out_dtype="float32")
    return build.weighted("linear.dense", case, weight_OI)


def grouped(build: LayerBuilder, prefix: str, groups: int) -> Product:
    """x_TGI -> y_TO [T, G L] in the compute dtype: a matrix for each group of channels."""
    weight = build.checkpoint.weight(prefix)
    weight_format, tensors, block = weight_tensors(weight)
    rows, columns = weight.shape
    case = GroupedCase(groups, rows // groups, columns, weight_format, block, build.dtype)
    return build.weighted("linear.grouped", case, *tensors)


class StackedLinear:
    """Products of one input with several matrices: a single one where their formats allow it."""

    def __init__(self, build: LayerBuilder, prefixes: Sequence[str]) -> None:
        weights = [build.checkpoint.weight(prefix) for prefix in prefixes]
        stacked = stack_rows(weights)
        kept = weights if stacked is None else [stacked]
        self._products = [_product(build, weight) for weight in kept]
        self._sizes = [weight.shape[0] for weight in weights]

    def __call__(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The products [T, O] of each matrix; their rows may lie apart."""
        if len(self._products) == 1:
            return self._products[0](x_TI).split(self._sizes, dim=-1)
        return tuple(product(x_TI) for product in self._products)

    def joined(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The products side by side, dense [T, sum of O]."""
        if len(self._products) == 1:
            return self._products[0](x_TI)
        return torch.cat([product(x_TI) for product in self._products], dim=-1)


def stack_rows(weights: Sequence[Weight]) -> Weight | None:
    """The matrices one below the other as one weight of the same format, or None where formats
    differ or a block of scales would straddle two matrices."""
    tensors = [weight_tensors(weight) for weight in weights]
    first_format, first_tensors, block = tensors[0]
    for weight_format, parts, other_block in tensors:
        dtypes = [part.dtype for part in parts] == [part.dtype for part in first_tensors]
        if not dtypes or weight_format != first_format or other_block != block:
            return None
    if any(weight.shape[0] % block[0] for weight in weights[:-1]):
        return None
    if first_format == "dense":
        return DenseWeight(torch.cat([parts[0] for _, parts, _ in tensors]))
    if first_format == "fp8_block":
        codes = torch.cat([parts[0].view(torch.uint8) for _, parts, _ in tensors])
        scale = torch.cat([parts[1] for _, parts, _ in tensors])
        return Fp8BlockWeight(codes.view(torch.float8_e4m3fn), scale, block)
    return None


def _product(build: LayerBuilder, weight: Weight) -> Product:
    weight_format, tensors, block = weight_tensors(weight)
    rows, columns = weight.shape
    if weight_format == "dense":
        case = DenseCase(rows, columns, build.dtype, out_dtype=build.dtype)
        return build.weighted("linear.dense", case, *tensors)
    fp8_case = Fp8BlockCase(rows, columns, block, build.dtype)
    return build.weighted("linear.fp8_block", fp8_case, *tensors)
