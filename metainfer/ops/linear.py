"""Contracts of the matrix products with weights."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance
from metainfer.ops.formats import SCALE_BYTES


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


@dataclass(frozen=True, slots=True)
class Fp8RowsCase:
    """Attributes:
    rows, columns: O and I of the weight.
    block: (rows, columns) of the weight that share a scale.
    group: channels of a row that share a scale.
    scale: of rows, "e8m0" or "fp32".
    dtype: format of the result.
    """

    rows: int
    columns: int
    block: tuple[int, int] = (128, 128)
    group: int = 128
    scale: str = "e8m0"
    dtype: str = "bfloat16"

    @property
    def operands(self) -> str:
        """In which the products are exact."""
        return "fp8"


@dataclass(frozen=True, slots=True)
class GroupedFp8RowsCase:
    """Attributes:
    groups: G, products side by side.
    rows, columns: L and I of each group's weight.
    block: (rows, columns) of the stacked weight [G * L, I] that share a scale.
    group, scale, dtype: as of `Fp8RowsCase`; `group` divides I.
    """

    groups: int
    rows: int
    columns: int
    block: tuple[int, int] = (128, 128)
    group: int = 128
    scale: str = "e8m0"
    dtype: str = "bfloat16"

    @property
    def operands(self) -> str:
        """In which the products are exact."""
        return "fp8"


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


def _fp8_rows_cost(case: Fp8RowsCase | GroupedFp8RowsCase, load: Load) -> Cost:
    groups = case.groups if isinstance(case, GroupedFp8RowsCase) else 1
    each = 1 + SCALE_BYTES[case.scale] / case.group
    row = case.columns * each + case.rows * ELEMENT_BYTES[case.dtype]
    moved = groups * (case.rows * case.columns + load.rows * row)
    return Cost(2.0 * load.rows * groups * case.rows * case.columns, moved)


# (O, I) of the quantised matrices of a layer, those with the same inputs one below the other:
# queries and latent, queries of heads, queries of the indexer, outputs, then feed forward.
_MATRICES: dict[str, tuple[tuple[int, int], ...]] = {
    "deepseek-v4-flash": (
        (1536, 4096),
        (32768, 1024),
        (8192, 1024),
        (4096, 8192),
        (4096, 4096),
        (4096, 2048),
    ),
    "deepseek-v4.1-flash": (
        (1792, 5120),
        (32768, 1280),
        (4096, 1280),
        (5120, 8192),
        (4608, 5120),
        (5120, 2304),
        (25600, 6144),
    ),
    "deepseek-v3.2": (
        (2112, 7168),
        (24576, 1536),
        (8192, 1536),
        (128, 7168),
        (7168, 16384),
        (36864, 7168),
        (7168, 18432),
        (4096, 7168),
        (7168, 2048),
    ),
    "glm-5.3": (
        (2624, 6144),
        (16384, 2048),
        (4096, 2048),
        (128, 6144),
        (6144, 16384),
        (24576, 6144),
        (6144, 12288),
        (4096, 6144),
        (6144, 2048),
    ),
    "pebble": ((640, 256), (2048, 128), (8192, 128), (256, 512), (256, 256), (256, 128)),
}
# Side of a block of weights, and what the scales of rows are.
_STORED = {
    "deepseek-v4-flash": (128, "e8m0"),
    "deepseek-v4.1-flash": (32, "e8m0"),
    "deepseek-v3.2": (128, "fp32"),
    "glm-5.3": (128, "fp32"),
    "pebble": (128, "e8m0"),
}


def _block_cases(model: str) -> tuple[Fp8BlockCase, ...]:
    side, _ = _STORED[model]
    return tuple(Fp8BlockCase(*matrix, block=(side, side)) for matrix in _MATRICES[model])


def _rows_cases(model: str) -> tuple[Fp8RowsCase, ...]:
    side, scale = _STORED[model]
    return tuple(Fp8RowsCase(*matrix, (side, side), side, scale) for matrix in _MATRICES[model])


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
        "deepseek-v4.1-flash": (
            DenseCase(1024, 5120, out_dtype="float32"),
            DenseCase(32, 5120, out_dtype="float32"),
            DenseCase(128, 512),
            DenseCase(129280, 5120, out_dtype="float32"),
        ),
        "deepseek-v3.2": (
            DenseCase(64, 7168, out_dtype="float32"),
            DenseCase(129280, 7168, out_dtype="float32"),
        ),
        "glm-5.3": (
            DenseCase(32, 6144, out_dtype="float32"),
            DenseCase(154880, 6144, out_dtype="float32"),
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
    cases={model: _block_cases(model) for model in _MATRICES},
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
        "deepseek-v4.1-flash": (GroupedCase(8, 1024, 4096, block=(32, 32)),),
        # Queries into the latent's space, and latents out of it, head by head.
        "deepseek-v3.2": (
            GroupedCase(128, 512, 128, "dense"),
            GroupedCase(128, 128, 512, "dense"),
        ),
        "glm-5.3": (GroupedCase(64, 512, 192, "dense"), GroupedCase(64, 256, 512, "dense")),
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

_ROWS_FORMULA = """y is the sum over groups of channels of
    scale of the row's group * scale of the weight's block * (sum of products of codes); groups and
    blocks are added in fp32, a sum of at most 128 products of codes as precisely as matrix units
    do (14 bits on some). Scales are never rounded. Codes are numbers: what is not has a scale that
    is none (NaN, e8m0 255), and so have results of its row."""

FP8_ROWS = Op(
    name="linear.fp8_rows",
    doc=f"""Product of rows in fp8 groups with a weight in fp8 blocks: both as codes and scales.

    {_ROWS_FORMULA}

    Prepared from:
        codes_OI, scale_BB: as in `linear.fp8_block`.

    Arguments:
        codes_TI: uint8 [T, I], e4m3; rows may lie apart.
        scales_TG: [T, ceil(I / group)], uint8 (e8m0) or fp32; rows may lie apart.

    Returns:
        y_TO: new, [T, O] in the case's dtype.
    """,
    cases={model: _rows_cases(model) for model in _MATRICES},
    small_cases=(
        Fp8RowsCase(256, 128, dtype="float32"),
        Fp8RowsCase(200, 144, scale="fp32", dtype="float32"),
        Fp8RowsCase(70, 96, block=(32, 32), group=32),
        Fp8RowsCase(256, 384),
        Fp8RowsCase(130, 640, scale="fp32"),
    ),
    cost=_fp8_rows_cost,
    tolerance=Tolerance(float32=2e-3),
    weights=("codes_OI", "scale_BB"),
)

GROUPED_FP8_ROWS = Op(
    name="linear.grouped_fp8_rows",
    doc=f"""As `linear.grouped` for rows in fp8 groups and weights in fp8 blocks: the first output
    projection of attention outputs that `quantise.fp8` rounded.

    {_ROWS_FORMULA}

    Prepared from:
        codes_OI: float8_e4m3fn [G * L, I], the groups one below the other.
        scale_BB: as in `linear.fp8_block`.

    Arguments:
        codes_TI: uint8 [T, G * I], e4m3; rows may lie apart.
        scales_TG: [T, G * I / group], uint8 (e8m0) or fp32; rows may lie apart.

    Returns:
        y_TO: new, [T, G * L] in the case's dtype, dense.
    """,
    cases={
        "deepseek-v4-flash": (GroupedFp8RowsCase(8, 1024, 4096),),
        "deepseek-v4.1-flash": (GroupedFp8RowsCase(8, 1024, 4096, (32, 32), 32),),
        "pebble": (GroupedFp8RowsCase(4, 128, 512),),
    },
    small_cases=(
        GroupedFp8RowsCase(2, 128, 256, dtype="float32"),
        GroupedFp8RowsCase(3, 96, 64, (32, 32), 32),
        GroupedFp8RowsCase(2, 72, 128, scale="fp32"),
        GroupedFp8RowsCase(3, 128, 128),
    ),
    cost=_fp8_rows_cost,
    tolerance=Tolerance(float32=2e-3),
    weights=("codes_OI", "scale_BB"),
)

OPS = (DENSE, FP8_BLOCK, GROUPED, FP8_ROWS, GROUPED_FP8_ROWS)
