"""Contracts of the matrix products with weights."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance


@dataclass(frozen=True, slots=True)
class DenseCase:
    """Attributes:
    rows, columns: O and I of the weight.
    dtype: format of x, "float32" or "bfloat16".
    out_dtype: format of the result. fp32 with bf16 operands means fp32 all the way: what the
        reference model computes in fp32 (compressors, router, logits).
    """

    rows: int
    columns: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Fp8BlockCase:
    """Attributes:
    rows, columns: O and I of the weight.
    block: (rows, columns) of the weight that share a scale.
    dtype: format of x and of the result.
    """

    rows: int
    columns: int
    block: tuple[int, int] = (128, 128)
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class GroupedCase:
    """Attributes:
    groups: G, products side by side.
    rows, columns: L and I of each group's weight.
    weight_format: "dense" or "fp8_block".
    block: (rows, columns) of the stacked weight [G * L, I] that share a scale.
    dtype: format of x and of the result.
    """

    groups: int
    rows: int
    columns: int
    weight_format: str = "fp8_block"
    block: tuple[int, int] = (128, 128)
    dtype: str = "bfloat16"


def _dense_cost(case: DenseCase, load: Load) -> Cost:
    size = ELEMENT_BYTES[case.dtype]
    moved = (case.rows * case.columns + load.rows * case.columns) * size
    moved += load.rows * case.rows * ELEMENT_BYTES[case.out_dtype]
    return Cost(2.0 * load.rows * case.rows * case.columns, moved)


def _fp8_cost(case: Fp8BlockCase, load: Load) -> Cost:
    moved = case.rows * case.columns
    moved += load.rows * (case.rows + case.columns) * ELEMENT_BYTES[case.dtype]
    return Cost(2.0 * load.rows * case.rows * case.columns, moved)


def _grouped_cost(case: GroupedCase, load: Load) -> Cost:
    size = ELEMENT_BYTES[case.dtype]
    weight = case.rows * case.columns * (size if case.weight_format == "dense" else 1)
    moved = case.groups * (weight + load.rows * (case.rows + case.columns) * size)
    return Cost(2.0 * load.rows * case.groups * case.rows * case.columns, moved)


DENSE = Op(
    name="linear.dense",
    doc="""Product with a weight that is stored as plain numbers.

    y[t, o] = sum over i of x[t, i] * weight[o, i], accumulated in fp32.

    Prepared from:
        weight_OI: fp32 or bf16 [O, I].

    Arguments:
        x_TI: [T, I] in the case's dtype; rows may lie apart.

    Returns:
        y_TO: new, [T, O] in the case's out_dtype.
    """,
    cases={
        "deepseek-v4-flash": (
            DenseCase(2 * 1024 + 2 * 256 + 64 + 2048, 4096, out_dtype="float32"),
            DenseCase(1024, 4096, out_dtype="float32"),
            DenseCase(129280, 4096, out_dtype="float32"),
        ),
        "pebble": (
            DenseCase(2624, 256, out_dtype="float32"),
            DenseCase(1024, 256, out_dtype="float32"),
            DenseCase(4096, 256, out_dtype="float32"),
        ),
    },
    small_cases=(
        DenseCase(24, 40, "float32", "float32"),
        DenseCase(64, 128, "bfloat16", "float32"),
        DenseCase(64, 128),
    ),
    cost=_dense_cost,
    weights=("weight_OI",),
)

FP8_BLOCK = Op(
    name="linear.fp8_block",
    doc="""Product with a weight of e4m3 codes, one scale per block of rows and columns.

    weight[o, i] = codes[o, i] * scale[o // block rows, i // block columns], and
    y[t, o] = sum over i of x[t, i] * weight[o, i], accumulated in fp32. Activations are used as
    they come: a backend that rounds them to fp8 first is another op.

    Prepared from:
        codes_OI: float8_e4m3fn [O, I].
        scale_BB: uint8 (e8m0: byte b means 2^(b - 127)) or fp32
            [ceil(O / block rows), ceil(I / block columns)].

    Arguments:
        x_TI: [T, I] in the case's dtype; rows may lie apart.

    Returns:
        y_TO: new, [T, O] in the case's dtype.
    """,
    cases={
        "deepseek-v4-flash": (
            Fp8BlockCase(1536, 4096),
            Fp8BlockCase(32768, 1024),
            Fp8BlockCase(8192, 1024),
            Fp8BlockCase(4096, 8192),
            Fp8BlockCase(4096, 4096),
            Fp8BlockCase(4096, 2048),
        ),
        "pebble": (
            Fp8BlockCase(640, 256),
            Fp8BlockCase(2048, 128),
            Fp8BlockCase(8192, 128),
            Fp8BlockCase(256, 512),
            Fp8BlockCase(256, 256),
            Fp8BlockCase(256, 128),
        ),
    },
    small_cases=(
        Fp8BlockCase(256, 128, dtype="float32"),
        Fp8BlockCase(200, 144, dtype="float32"),
        Fp8BlockCase(64, 96, block=(32, 32), dtype="float32"),
        Fp8BlockCase(256, 384),
    ),
    cost=_fp8_cost,
    weights=("codes_OI", "scale_BB"),
)

GROUPED = Op(
    name="linear.grouped",
    doc="""Products of groups of channels with a weight each: the first output projection.

    y[t, g, l] = sum over i of x[t, g, i] * weight[g * L + l, i], accumulated in fp32.

    Prepared from:
        weight_OI: [G * L, I], the groups one below the other: fp32 or bf16 numbers, or for
            "fp8_block" e4m3 codes.
        scale_BB: for "fp8_block" alone, as in `linear.fp8_block`.

    Arguments:
        x_TGI: [T, G, I] in the case's dtype, dense.

    Returns:
        y_TO: new, [T, G * L] in the case's dtype, dense.
    """,
    cases={
        "deepseek-v4-flash": (GroupedCase(8, 1024, 4096),),
        "pebble": (GroupedCase(4, 128, 512),),
    },
    small_cases=(
        GroupedCase(2, 16, 40, "dense", dtype="float32"),
        GroupedCase(2, 128, 256, dtype="float32"),
        GroupedCase(4, 128, 128),
        GroupedCase(3, 64, 128, "dense"),
    ),
    cost=_grouped_cost,
    tolerance=Tolerance(),
    weights=("weight_OI", "scale_BB"),
)

OPS = (DENSE, FP8_BLOCK, GROUPED)
