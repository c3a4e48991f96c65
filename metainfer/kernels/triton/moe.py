"""The routed experts in Triton: rows are put in the order of their experts, then come gate and up
with the activation, then down, a row for each choice, and the sum of these.

Rows in e4m3 codes are multiplied as such where the GPU can and the weights are e4m3 numbers times
one factor (`moe_weights`). Everywhere else rows and weights become bf16 first, which holds both
exactly, and the activation inside is rounded to codes all the same: one function on every GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Variant, Verdict, no
from metainfer.kernels.triton import moe_rows
from metainfer.kernels.triton.backend import Declared, on_gpu
from metainfer.kernels.triton.launch import Launcher, cdiv, has_fp8, next_power_of_2
from metainfer.kernels.triton.moe_order import Order, order
from metainfer.kernels.triton.moe_product import grouped_product
from metainfer.kernels.triton.moe_tiles import Tiles, tiles_of
from metainfer.kernels.triton.moe_weights import (
    Experts,
    Matrix,
    dense_matrix,
    folded_matrix,
    fp4_matrix,
    fp8_matrix,
)
from metainfer.ops.base import Target
from metainfer.ops.moe import ExpertsCase, ExpertsFp8RowsCase, SwigluFp8Case

Tensors = tuple[torch.Tensor, ...]

_FP8_GROUP = 128  # channels over which products of codes are added up before they are scaled
_FP8_FORMS = ("folded", "fp8")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that go through a product.

    Attributes:
        numbers: [R, C], or e4m3 codes.
        scales: of groups of codes [R, C / group]; None for numbers.
        per: slots that share a row.
    """

    numbers: torch.Tensor
    scales: torch.Tensor | None
    per: int


def prepare(case: ExpertsCase, w1: Tensors, w2: Tensors, w3: Tensors) -> Experts:
    if case.weight_format == "dense":
        return Experts(dense_matrix(case.dtype, w1, w3), dense_matrix(case.dtype, w2))
    matrix = fp8_matrix if case.weight_format == "fp8_block" else fp4_matrix
    return Experts(matrix(w1, w3), matrix(w2))


def prepare_fp8_rows(case: ExpertsFp8RowsCase, w1: Tensors, w2: Tensors, w3: Tensors) -> Experts:
    if case.weight_format == "fp8_block":
        return Experts(fp8_matrix(w1, w3), fp8_matrix(w2))
    if case.group != _FP8_GROUP:
        return Experts(fp4_matrix(w1, w3), fp4_matrix(w2))
    return Experts(folded_matrix("gate and up", w1, w3), folded_matrix("down", w2))


def experts(
    launch: Launcher,
    case: ExpertsCase,
    weights: Experts,
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    tiles: Tiles | None = None,
    steps: int = 0,
) -> torch.Tensor:
    """`tiles` for experiments; `steps` as of `moe_tiles.height_of`."""
    call = _Call(launch, case, ids_TK, tiles, has_codes=False, steps=steps)
    hidden = call.gate_up(weights, Rows(x_TD, None, case.selected))
    return call.down(weights, Rows(hidden, None, 1), weights_TK)


def experts_fp8_rows(
    launch: Launcher,
    case: ExpertsFp8RowsCase,
    weights: Experts,
    codes_TD: torch.Tensor,
    scales_TG: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    tiles: Tiles | None = None,
    steps: int = 0,
) -> torch.Tensor:
    """`tiles` for experiments; `steps` as of `moe_tiles.height_of`."""
    as_codes = [
        has_fp8(launch) and case.group == _FP8_GROUP and matrix.form in _FP8_FORMS
        for matrix in (weights.gate_up, weights.down)
    ]
    call = _Call(launch, case, ids_TK, tiles, has_codes=as_codes[0], steps=steps)
    dtype = TORCH_DTYPES[case.dtype]
    rows = Rows(codes_TD, scales_TG, case.selected)
    if not as_codes[0]:
        numbers = moe_rows.decoded(launch, case.group, dtype, codes_TD, scales_TG)
        rows = Rows(numbers, None, case.selected)
    inside = "codes" if as_codes[1] else "rounded"
    if call.tiles.gate_up.channels % case.group == 0:
        hidden, scales = call.gate_up_coded(weights, rows, inside)
    else:
        hidden, scales = call.gate_up(weights, rows), None
        coded = SwigluFp8Case(case.inner, case.limit, case.group, case.scale, case.dtype)
        if as_codes[1]:
            hidden, scales = moe_rows.coded(launch, coded, hidden, False)
        else:
            hidden = moe_rows.through_codes(launch, coded, hidden)
    return call.down(weights, Rows(hidden, scales, 1), weights_TK)


class _Call:
    """One call of the experts: the order of its rows, and its launches."""

    def __init__(
        self,
        launch: Launcher,
        case: ExpertsCase | ExpertsFp8RowsCase,
        ids_TK: torch.Tensor,
        tiles: Tiles | None,
        has_codes: bool,
        steps: int,
    ) -> None:
        self._launch = launch
        self._case = case
        self._ids_TK = ids_TK.contiguous()
        self._dtype = TORCH_DTYPES[case.dtype]
        self.tiles = tiles or tiles_of(case, len(ids_TK), launch.capability, has_codes, steps)
        self._order: Order = order(launch, self._ids_TK, case.experts, self.tiles.rows)

    def gate_up(self, weights: Experts, rows: Rows) -> torch.Tensor:
        """Activations [slots, F]."""
        slots = self._ids_TK.numel()
        hidden = rows.numbers.new_empty(slots, self._case.inner, dtype=self._dtype)
        self._product(weights.gate_up, True, rows, hidden, None, None, "")
        return hidden

    def gate_up_coded(
        self, weights: Experts, rows: Rows, inside: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Activations as codes and scales, or rounded to codes."""
        case, slots = self._case, self._ids_TK.numel()
        assert isinstance(case, ExpertsFp8RowsCase)
        new = rows.numbers.new_empty
        if inside == "rounded":
            hidden, scales = new(slots, case.inner, dtype=self._dtype), None
        else:
            kept = torch.uint8 if case.scale == "e8m0" else torch.float32
            hidden = new(slots, case.inner, dtype=torch.uint8)
            scales = new(slots, case.inner // case.group, dtype=kept)
        self._product(weights.gate_up, True, rows, hidden, scales, None, inside)
        return hidden, scales

    def down(self, weights: Experts, rows: Rows, weights_TK: torch.Tensor) -> torch.Tensor:
        """The op's result."""
        slots = self._ids_TK.numel()
        parts = rows.numbers.new_empty(slots, self._case.width, dtype=self._dtype)
        self._product(weights.down, False, rows, parts, None, weights_TK.contiguous(), "")
        return moe_rows.added(self._launch, self._case.experts, self._ids_TK, parts)

    def _product(
        self,
        matrix: Matrix,
        is_gated: bool,
        rows: Rows,
        y: torch.Tensor,
        y_scales: torch.Tensor | None,
        shares_TK: torch.Tensor | None,
        inside: str,
    ) -> None:
        case, ordered = self._case, self._order
        tile = self.tiles.gate_up if is_gated else self.tiles.down
        outputs, columns = y.shape[1], rows.numbers.shape[1]
        step = _step(tile.step, matrix.form, columns, case.block[1])
        self._launch(
            grouped_product,
            (ordered.tiles * cdiv(outputs, tile.channels),),
            rows.numbers,
            rows.scales,
            *matrix[1:],
            ordered.slots,
            ordered.experts,
            shares_TK,
            y,
            y_scales,
            ordered.tiles,
            rows.numbers.stride(0),
            float(case.limit),
            num_warps=tile.warps,
            num_stages=tile.stages,
            E=case.experts,
            N=outputs,
            C=columns,
            PER=rows.per,
            FORM=matrix.form,
            OPERAND=self._operand(rows),
            ROWS_FP8=rows.scales is not None,
            GROUP=getattr(case, "group", 1),
            E8M0=getattr(case, "scale", "") == "e8m0",
            BLOCK_N=case.block[0],
            BLOCK_C=case.block[1],
            GATED=is_gated,
            SORTED=ordered.slots is not None,
            INSIDE=inside,
            BM=self.tiles.rows,
            BN=2 * tile.channels if is_gated else tile.channels,
            BK=step,
            GM=tile.band,
            SWAP=tile.swap,
            ASM=not self._launch.interpreted,
            **({"maxnreg": tile.registers} if tile.registers else {}),
        )

    def _operand(self, rows: Rows) -> str:
        if self._launch.interpreted or rows.numbers.dtype is torch.float32:
            return "fp32"
        return "bf16" if rows.scales is None else "fp8"


def _step(most: int, form: str, columns: int, block: int) -> int:
    """Columns of a step: a power of two that fills the columns where one does, whole groups of
    fp4, within a block."""
    least = 32 if form in ("fp4", "folded") else 16
    step = max(least, min(most, next_power_of_2(columns)))
    if form == "fp8":
        step = min(step, block)
    while step > least and columns % step and form != "dense":
        step //= 2
    return step


def eligible(case: ExpertsCase, target: Target) -> Verdict:
    return _known_blocks(case, target)


def eligible_fp8_rows(case: ExpertsFp8RowsCase, target: Target) -> Verdict:
    if case.width % case.group or case.inner % case.group or case.group not in (32, _FP8_GROUP):
        return no(f"wants groups of 32 or 128 that fill {case.width} and {case.inner} channels")
    if case.dtype != "bfloat16":
        return no(f"rounds the activation inside to bf16, not to {case.dtype}")
    return _known_blocks(case, target)


def _known_blocks(case: Any, target: Target) -> Verdict:
    rows, columns = case.block
    if case.weight_format == "fp4_group":
        if (rows, columns) != (1, 32) or case.width % 32 or case.inner % 32:
            return no(f"wants fp4 in whole groups of 32 columns, not of {case.block}")
    elif case.weight_format == "fp8_block" and (columns & (columns - 1) or columns < 16):
        return no(f"scales fp8 in blocks of a power of two of columns, not of {columns}")
    return on_gpu(case, target)


def _heights(run: Callable[..., torch.Tensor]) -> dict[str, Variant]:
    """Tiles of other heights than the rows of an expert suggest."""
    steps = {"lower": -1, "taller": 1}
    return {name: Variant(partial(_moved, run, n)) for name, n in steps.items()}


def _moved(run: Callable[..., torch.Tensor], steps: int, *arguments: Any) -> torch.Tensor:
    return run(*arguments, steps=steps)


BACKENDS = (
    Declared("moe.experts", experts, eligible, prepare, variants=_heights(experts)),
    Declared(
        "moe.experts_fp8_rows",
        experts_fp8_rows,
        eligible_fp8_rows,
        prepare_fp8_rows,
        variants=_heights(experts_fp8_rows),
    ),
    *moe_rows.BACKENDS,
)
