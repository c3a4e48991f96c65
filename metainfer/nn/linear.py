"""Matrix products with weights in any stored format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from metainfer.nn.builder import LayerBuilder, weight_tensors
from metainfer.nn.rows import Rows, rounds
from metainfer.ops.linear import (
    DenseCase,
    Fp8BlockCase,
    Fp8RowsCase,
    GroupedCase,
    GroupedFp8RowsCase,
)
from metainfer.weights.formats import DenseWeight, Fp8BlockWeight, Weight


class Linear:
    """Rows -> y_TO in the compute dtype.

    Attributes:
        coded: whether it reads rows as codes.
    """

    def __init__(self, build: LayerBuilder, weight: Weight) -> None:
        weight_format, tensors, block = weight_tensors(weight)
        rows, columns = weight.shape
        self.coded = weight_format == "fp8_block" and rounds(build, columns)
        if weight_format == "dense":
            case = DenseCase(rows, columns, build.dtype, out_dtype=build.dtype)
            self._run = build.weighted("linear.dense", case, *tensors)
        elif self.coded:
            assert build.rounding is not None
            coded_case = Fp8RowsCase(rows, columns, block, *build.rounding, build.dtype)
            self._run = build.weighted("linear.fp8_rows", coded_case, *tensors)
        else:
            fp8_case = Fp8BlockCase(rows, columns, block, build.dtype)
            self._run = build.weighted("linear.fp8_block", fp8_case, *tensors)

    def __call__(self, x: Rows) -> torch.Tensor:
        return self._run(*x.coded) if self.coded else self._run(x.plain)


def linear(build: LayerBuilder, prefix: str) -> Linear:
    """The product with the matrix `prefix`."""
    return Linear(build, build.checkpoint.weight(prefix))


def dense_fp32(build: LayerBuilder, names: Sequence[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """x_TI -> fp32 y_TO with plain matrices, stacked in one product."""
    tensors = [build.checkpoint.tensor(name) for name in names]
    weight_OI = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    rows, columns = weight_OI.shape
    case = DenseCase(rows, columns, build.dtype, out_dtype="float32")
    return build.weighted("linear.dense", case, weight_OI)


class Grouped:
    """Rows of G groups of I channels -> y_TO [T, G L] in the compute dtype, a matrix for each.

    Args:
        width: of the pieces in which rows are rounded, if they are.

    Attributes:
        coded: whether it reads rows as codes.
    """

    def __init__(self, build: LayerBuilder, weight: Weight, groups: int, width: int) -> None:
        weight_format, tensors, block = weight_tensors(weight)
        rows, columns = weight.shape
        shape = groups, rows // groups, columns
        self._groups = groups
        self.coded = weight_format == "fp8_block" and rounds(build, width)
        if self.coded:
            assert build.rounding is not None
            coded_case = GroupedFp8RowsCase(*shape, block, *build.rounding, build.dtype)
            self._run = build.weighted("linear.grouped_fp8_rows", coded_case, *tensors)
        else:
            case = GroupedCase(*shape, weight_format, block, build.dtype)
            self._run = build.weighted("linear.grouped", case, *tensors)

    def __call__(self, x: Rows) -> torch.Tensor:
        if self.coded:
            return self._run(*x.coded)
        return self._run(x.plain.view(len(x.plain), self._groups, -1))


def stacked_linear(build: LayerBuilder, prefixes: Sequence[str]) -> StackedLinear:
    """The products with the matrices `prefixes`."""
    return StackedLinear(build, [build.checkpoint.weight(prefix) for prefix in prefixes])


class StackedLinear:
    """Products of one input with several matrices: a single one where their formats allow it.

    Attributes:
        coded: whether any reads rows as codes.
    """

    def __init__(self, build: LayerBuilder, weights: Sequence[Weight]) -> None:
        stacked = stack_rows(weights)
        kept = weights if stacked is None else [stacked]
        self._products = [Linear(build, weight) for weight in kept]
        self.coded = any(product.coded for product in self._products)
        self._sizes = [weight.shape[0] for weight in weights]

    def __call__(self, x: Rows) -> tuple[torch.Tensor, ...]:
        """The products [T, O] of each matrix; their rows may lie apart."""
        if len(self._products) == 1:
            return self._products[0](x).split(self._sizes, dim=-1)
        return tuple(product(x) for product in self._products)

    def joined(self, x: Rows) -> torch.Tensor:
        """The products side by side, dense [T, sum of O]."""
        if len(self._products) == 1:
            return self._products[0](x)
        return torch.cat([product(x) for product in self._products], dim=-1)


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
