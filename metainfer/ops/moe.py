"""Contracts of the mixture of experts: routing, routed experts, and the gated activation."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance

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
    """

    experts: int
    selected: int
    width: int
    scale: float
    normalise: bool = True
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """Attributes:
    experts: E routed experts.
    selected: K of them per row.
    width, inner: D of a row, F inside an expert.
    limit: clamp of gate and up.
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
class SwigluCase:
    """Attributes:
    inner: F.
    limit: clamp of gate and up.
    dtype: format of input and result.
    """

    inner: int
    limit: float
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


def _swiglu_cost(case: SwigluCase, load: Load) -> Cost:
    elements = load.rows * case.inner
    return Cost(6.0 * elements, 3.0 * elements * ELEMENT_BYTES[case.dtype])


_ROUTES = {
    "deepseek-v4-flash": (RouteCase(256, 6, 4096, 1.5),),
    "pebble": (RouteCase(16, 4, 256, 1.5),),
}
_SMALL_ROUTES = (
    RouteCase(8, 2, 24, 1.5, dtype="float32"),
    RouteCase(8, 3, 24, 2.5, normalise=False, dtype="float32"),
    RouteCase(16, 4, 64, 1.5),
)

_FORMULA = """In fp32: s = sqrt(softplus(gate x)); the weights are s of the chosen experts, where
    `normalise` divided by (their sum + 1e-20), times the case's scale."""

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

    Returns:
        ids_TK: int64 [T, K].
        weights_TK: fp32 [T, K].
    """,
    cases=_ROUTES,
    small_cases=_SMALL_ROUTES,
    cost=_route_cost,
    tolerance=Tolerance(bfloat16=1e-5),
    weights=("gate_ED", "table_VK"),
)

ROUTE_LEARNED = Op(
    name="moe.route_learned",
    doc=f"""Routes each row to the K experts with the largest s + bias.

    {_FORMULA} The bias takes part in the choice alone. The order of the K, and the choice among
    equals, are open.

    Prepared from:
        gate_ED: fp32 or bf16 [E, D].
        bias_E: fp32 [E].

    Arguments:
        x_TD: [T, D] in the case's dtype.

    Returns:
        ids_TK: int64 [T, K].
        weights_TK: fp32 [T, K].
    """,
    cases=_ROUTES,
    small_cases=_SMALL_ROUTES,
    cost=_route_cost,
    tolerance=Tolerance(bfloat16=1e-5),
    weights=("gate_ED", "bias_E"),
)

EXPERTS = Op(
    name="moe.experts",
    doc="""The routed experts: each row goes through its K experts, whose outputs are added.

    y[t] = sum over k of weights[t, k] * w2_e (silu(min(w1_e x, limit)) * clip(w3_e x, limit)) with
    e = ids[t, k] and clip to [-limit, limit]. Products accumulate in fp32; the sum is fp32.

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
        "pebble": (SwigluCase(128, 10.0),),
    },
    small_cases=(SwigluCase(24, 1.0, dtype="float32"), SwigluCase(64, 1.0)),
    cost=_swiglu_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

OPS = (ROUTE_HASH, ROUTE_LEARNED, EXPERTS, SWIGLU)
