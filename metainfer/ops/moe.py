"""Contracts of the mixture of experts: routing, routed experts, and the gated activation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance
from metainfer.ops.formats import SCALE_BYTES

_WEIGHT_BYTES = {"dense": None, "fp8_block": 1.0, "fp4_group": 0.53125}


@dataclass(frozen=True, slots=True)
class RouteCase:
    """Attributes:
    experts: E routed experts.
    selected: K of them per row.
    width: D of a row.
    scale: factor on the routing weights.
    normalise: whether the K weights of a row are divided by their sum first.
    dtype: format of x.
    score: "sqrtsoftplus" or "sigmoid".
    groups, group_topk: of so many equal groups of experts, so many may be chosen from.
    """

    experts: int
    selected: int
    width: int
    scale: float
    normalise: bool = True
    dtype: str = "bfloat16"
    score: str = "sqrtsoftplus"
    groups: int = 1
    group_topk: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """Attributes:
    experts: E routed experts.
    selected: K of them per row.
    width, inner: D of a row, F inside an expert.
    limit: clamp of gate and up; infinity for none.
    weight_format: "dense", "fp8_block" or "fp4_group".
    block: (rows, columns) that share a scale; (1, 32) for fp4.
    dtype: format of x and of the products.
    """

    experts: int
    selected: int
    width: int
    inner: int
    limit: float
    weight_format: str = "fp4_group"
    block: tuple[int, int] = (1, 32)
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class ExpertsFp8RowsCase:
    """Attributes:
    experts: E routed experts.
    selected: K of them per row.
    width, inner: D of a row, F inside an expert, both multiples of the group.
    limit: clamp of gate and up; infinity for none.
    weight_format: "fp8_block" or "fp4_group".
    block: (rows, columns) of a weight that share a scale; (1, 32) for fp4.
    group: channels of a row, and of the activation inside, that share a scale: 32 or 128.
    scale: "e8m0", a byte each, or "fp32"; powers of two in both.
    dtype: what the activation inside is rounded to before it is quantised.
    """

    experts: int
    selected: int
    width: int
    inner: int
    limit: float
    weight_format: str = "fp4_group"
    block: tuple[int, int] = (1, 32)
    group: int = 128
    scale: str = "e8m0"
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class SwigluCase:
    """Attributes:
    inner: F.
    limit: clamp of gate and up; infinity for none.
    dtype: format of input and result.
    """

    inner: int
    limit: float
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class SwigluFp8Case:
    """Attributes:
    inner: F, a multiple of the group.
    limit: clamp of gate and up; infinity for none.
    group: channels per scale, 32 or 128.
    scale: "e8m0", a byte each, or "fp32"; powers of two in both.
    dtype: format of the input, and of the result before it is quantised.
    """

    inner: int
    limit: float
    group: int = 128
    scale: str = "e8m0"
    dtype: str = "bfloat16"


def _route_cost(case: RouteCase, load: Load) -> Cost:
    moved = 2.0 * case.experts * case.width
    moved += load.rows * case.width * ELEMENT_BYTES[case.dtype]
    return Cost(2.0 * load.rows * case.experts * case.width, moved)


def _experts_cost(case: ExpertsCase, load: Load) -> Cost:
    per_expert = 3 * case.width * case.inner
    size = _WEIGHT_BYTES[case.weight_format] or ELEMENT_BYTES[case.dtype]
    # As many experts are read as rows can choose.
    active = min(case.experts, load.rows * case.selected)
    moved = active * per_expert * size + 2.0 * load.rows * case.width * ELEMENT_BYTES[case.dtype]
    return Cost(2.0 * load.rows * case.selected * per_expert, moved)


def _experts_fp8_rows_cost(case: ExpertsFp8RowsCase, load: Load) -> Cost:
    per_expert = 3 * case.width * case.inner
    active = min(case.experts, load.rows * case.selected)
    moved = active * per_expert * (_WEIGHT_BYTES[case.weight_format] or 0.0)
    moved += load.rows * case.width * (1 + SCALE_BYTES[case.scale] / case.group + 4)
    return Cost(2.0 * load.rows * case.selected * per_expert, moved)


def _swiglu_cost(case: SwigluCase, load: Load) -> Cost:
    elements = load.rows * case.inner
    return Cost(6.0 * elements, 3.0 * elements * ELEMENT_BYTES[case.dtype])


def _swiglu_fp8_cost(case: SwigluFp8Case, load: Load) -> Cost:
    elements = load.rows * case.inner
    each = 2 * ELEMENT_BYTES[case.dtype] + 1 + SCALE_BYTES[case.scale] / case.group
    return Cost(8.0 * elements, elements * each)


_HASHED = {
    "deepseek-v4-flash": (RouteCase(256, 6, 4096, 1.5),),
    "pebble": (RouteCase(16, 4, 256, 1.5),),
}
_LEARNED = {
    **_HASHED,
    "deepseek-v4.1-flash": (RouteCase(384, 6, 5120, 1.5),),
    "deepseek-v3.2": (RouteCase(256, 8, 7168, 2.5, score="sigmoid", groups=8, group_topk=4),),
    "glm-5.3": (RouteCase(256, 8, 6144, 2.5, score="sigmoid"),),
}
_SMALL_ROUTES = (
    RouteCase(8, 2, 24, 1.5, dtype="float32"),
    RouteCase(8, 3, 24, 2.5, normalise=False, dtype="float32"),
    RouteCase(16, 4, 64, 1.5),
    RouteCase(12, 3, 64, 2.5, score="sigmoid"),
)
_SMALL_GROUPS = (
    RouteCase(16, 4, 24, 2.5, dtype="float32", score="sigmoid", groups=4, group_topk=2),
)

_FORMULA = """In fp32: s = sqrt(softplus(gate x)), or the sigmoid of gate x where the case's score
    says so; the weights are s of the chosen experts, where `normalise` divided by (their sum +
    1e-20), times the case's scale."""

ROUTE_HASH = Op(
    name="moe.route_hash",
    doc=f"""Routes each row to the experts that a table holds for its token.

    {_FORMULA}

    Prepared from:
        gate_ED: fp32 or bf16 [E, D].
        table_VK: int64 [vocabulary, K].

    Arguments:
        x_TD: [T, D] in the case's dtype.
        token_ids_T: int64 [T].
        padding_T1: bool [T, 1], rows that need no expert: their ids are -1, their weights anything;
            None where all rows do.

    Returns:
        ids_TK: int64 [T, K].
        weights_TK: fp32 [T, K].
    """,
    cases=_HASHED,
    small_cases=_SMALL_ROUTES,
    cost=_route_cost,
    tolerance=Tolerance(bfloat16=1e-5),
    weights=("gate_ED", "table_VK"),
)

ROUTE_LEARNED = Op(
    name="moe.route_learned",
    doc=f"""Routes each row to the K experts with the largest s + bias.

    {_FORMULA} The bias takes part in the choice alone. With several groups of experts, which
    follow each other, those groups are kept whose two largest s + bias have the largest sums, and
    only their experts can be chosen. The order of the K, and the choice among equals, are open.

    Prepared from:
        gate_ED: fp32 or bf16 [E, D].
        bias_E: fp32 [E].

    Arguments:
        x_TD: [T, D] in the case's dtype.
        padding_T1: bool [T, 1], rows that need no expert: their ids are -1, their weights anything;
            None where all rows do.

    Returns:
        ids_TK: int64 [T, K].
        weights_TK: fp32 [T, K].
    """,
    cases=_LEARNED,
    small_cases=_SMALL_ROUTES + _SMALL_GROUPS,
    cost=_route_cost,
    tolerance=Tolerance(bfloat16=1e-5),
    weights=("gate_ED", "bias_E"),
)

EXPERTS = Op(
    name="moe.experts",
    doc="""The routed experts: each row goes through its K experts, whose outputs are added.

    y[t] = sum over k of weights[t, k] * w2_e (silu(min(w1_e x, limit)) * clip(w3_e x, limit)) with
    e = ids[t, k] and clip to [-limit, limit]. Products accumulate in fp32; the sum is fp32. An id
    outside 0 .. E - 1 counts nothing: of an expert that is elsewhere, or of a row that is empty.

    Prepared from (each a tuple of the tensors of its format, stacked over experts):
        w1, w3: gate and up, [E, F, D].
        w2: down, [E, D, F].
        "dense": (numbers fp32 or bf16,); "fp8_block": (e4m3 codes, scales [E, .., ..] as uint8
        e8m0 or fp32); "fp4_group": (uint8 [E, rows, columns / 2], the even column in the low
        nibble; uint8 e8m0 scales [E, rows, columns / 32]).

    Arguments:
        x_TD: [T, D] in the case's dtype, dense.
        ids_TK: int64 [T, K].
        weights_TK: fp32 [T, K].

    Returns:
        y_TD: new, fp32 [T, D].
    """,
    cases={
        "deepseek-v4-flash": (ExpertsCase(256, 6, 4096, 2048, 10.0),),
        "deepseek-v4.1-flash": (ExpertsCase(384, 6, 5120, 2304, 10.0),),
        "deepseek-v3.2": (ExpertsCase(256, 8, 7168, 2048, math.inf, "fp8_block", (128, 128)),),
        "glm-5.3": (
            ExpertsCase(256, 8, 6144, 2048, math.inf, "fp8_block", (128, 128)),
            ExpertsCase(256, 8, 6144, 2048, math.inf, "dense", (1, 1)),
        ),
        "pebble": (ExpertsCase(16, 4, 256, 128, 10.0),),
    },
    small_cases=(
        ExpertsCase(6, 2, 24, 40, 1.0, "dense", dtype="float32"),
        ExpertsCase(4, 2, 128, 256, 1.0, "fp8_block", (128, 128), "float32"),
        ExpertsCase(8, 3, 64, 96, 1.0, "fp4_group", dtype="float32"),
        ExpertsCase(8, 3, 64, 96, 1.0),
        ExpertsCase(4, 2, 128, 128, 1.0, "fp8_block", (128, 128)),
    ),
    cost=_experts_cost,
    weights=("w1", "w2", "w3"),
)

EXPERTS_FP8_ROWS = Op(
    name="moe.experts_fp8_rows",
    doc="""The routed experts as `moe.experts`, over rows that are e4m3 codes with a scale for each
    group of channels (`ops/formats.py`), as the released models run them.

    h[t, k] = silu(min(w1_e x, limit)) * clip(w3_e x, limit) is rounded to the case's dtype, then
    to e4m3 codes with scales as `quantise.fp8` does, and y[t] = sum over k of weights[t, k] *
    w2_e h[t, k]. Products accumulate in fp32; the sum is fp32. An id outside 0 .. E - 1 counts
    nothing.

    Prepared from:
        w1, w2, w3: as `moe.experts`; "fp8_block" or "fp4_group".

    Arguments:
        codes_TD: uint8 [T, D]; rows may lie apart.
        scales_TG: [T, D / group], uint8 (e8m0) or fp32, dense.
        ids_TK: int64 [T, K].
        weights_TK: fp32 [T, K].

    Returns:
        y_TD: new, fp32 [T, D].
    """,
    cases={
        "deepseek-v4-flash": (ExpertsFp8RowsCase(256, 6, 4096, 2048, 10.0),),
        "deepseek-v4.1-flash": (ExpertsFp8RowsCase(384, 6, 5120, 2304, 10.0, group=32),),
        "deepseek-v3.2": (
            ExpertsFp8RowsCase(256, 8, 7168, 2048, math.inf, "fp8_block", (128, 128), scale="fp32"),
        ),
        "glm-5.3": (
            ExpertsFp8RowsCase(256, 8, 6144, 2048, math.inf, "fp8_block", (128, 128), scale="fp32"),
        ),
        "pebble": (ExpertsFp8RowsCase(16, 4, 256, 128, 10.0),),
    },
    small_cases=(
        ExpertsFp8RowsCase(8, 3, 128, 256, 1.0),
        ExpertsFp8RowsCase(5, 2, 64, 96, math.inf, group=32),
        ExpertsFp8RowsCase(4, 2, 256, 128, 1.0, "fp8_block", (128, 128), scale="fp32"),
    ),
    cost=_experts_fp8_rows_cost,
    weights=("w1", "w2", "w3"),
)

SWIGLU = Op(
    name="moe.swiglu",
    doc="""The clamped gated activation of an expert.

    y = silu(min(gate, limit)) * clip(up, -limit, limit), computed in fp32.

    Arguments:
        gate_up_TF: [T, 2 F] in the case's dtype, gate first; dense. May be overwritten.

    Returns:
        y_TF: [T, F] in the case's dtype; may share the memory of the argument.
    """,
    cases={
        "deepseek-v4-flash": (SwigluCase(2048, 10.0),),
        "deepseek-v4.1-flash": (SwigluCase(2304, 10.0),),
        "deepseek-v3.2": (SwigluCase(2048, math.inf), SwigluCase(18432, math.inf)),
        "glm-5.3": (SwigluCase(2048, math.inf), SwigluCase(12288, math.inf)),
        "pebble": (SwigluCase(128, 10.0),),
    },
    small_cases=(
        SwigluCase(24, 1.0, dtype="float32"),
        SwigluCase(64, 1.0),
        SwigluCase(160, math.inf),
    ),
    cost=_swiglu_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

SWIGLU_FP8 = Op(
    name="moe.swiglu_fp8",
    doc="""The clamped gated activation of an expert, as e4m3 codes with a scale for each group of
    channels: `moe.swiglu`, then `quantise.fp8`.

    Arguments:
        gate_up_TF: [T, 2 F] in the case's dtype, gate first; dense.

    Returns:
        codes_TF: uint8 [T, F], e4m3.
        scales_TG: [T, F / group], uint8 (e8m0) or fp32.
    """,
    cases={
        "deepseek-v4-flash": (SwigluFp8Case(2048, 10.0),),
        "deepseek-v4.1-flash": (SwigluFp8Case(2304, 10.0, group=32),),
        "deepseek-v3.2": (
            SwigluFp8Case(2048, math.inf, scale="fp32"),
            SwigluFp8Case(18432, math.inf, scale="fp32"),
        ),
        "glm-5.3": (
            SwigluFp8Case(2048, math.inf, scale="fp32"),
            SwigluFp8Case(12288, math.inf, scale="fp32"),
        ),
        "pebble": (SwigluFp8Case(128, 10.0),),
    },
    small_cases=(
        SwigluFp8Case(128, 1.0, dtype="float32"),
        SwigluFp8Case(96, math.inf, group=32),
        SwigluFp8Case(384, 1.0, scale="fp32"),
    ),
    cost=_swiglu_fp8_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

OPS = (ROUTE_HASH, ROUTE_LEARNED, EXPERTS, EXPERTS_FP8_ROWS, SWIGLU, SWIGLU_FP8)
