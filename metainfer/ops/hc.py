"""Contracts of the hyper-connections: S residual streams, mixed around every sublayer."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance


@dataclass(frozen=True, slots=True)
class HyperCase:
    """Attributes:
    streams, width: S and D.
    iterations: rounds of Sinkhorn's normalisation.
    eps: added where the contract says so.
    norm_eps: added to the mean square of a row's streams.
    stream_dtype: format of the streams, "float32" or "bfloat16".
    dtype: format of the sublayer's input.
    """

    streams: int
    width: int
    iterations: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-6
    stream_dtype: str = "bfloat16"
    dtype: str = "bfloat16"


def _mix_cost(case: HyperCase, load: Load) -> Cost:
    mixes = (2 + case.streams) * case.streams
    elements = load.rows * case.streams * case.width
    moved = elements * ELEMENT_BYTES[case.stream_dtype]
    moved += load.rows * case.width * ELEMENT_BYTES[case.dtype]
    return Cost(2.0 * elements * (mixes + 2), moved)


def _expand_cost(case: HyperCase, load: Load) -> Cost:
    elements = load.rows * case.streams * case.width
    moved = 2 * elements * ELEMENT_BYTES[case.stream_dtype] + 4 * load.rows * case.width
    return Cost(2.0 * elements * (case.streams + 1), moved)


def _head_cost(case: HyperCase, load: Load) -> Cost:
    elements = load.rows * case.streams * case.width
    return Cost(2.0 * elements * (case.streams + 2), elements * ELEMENT_BYTES[case.stream_dtype])


_CASES = {
    "deepseek-v4-flash": (HyperCase(4, 4096),),
    "pebble": (HyperCase(4, 256),),
}
_SMALL = (
    HyperCase(4, 24, stream_dtype="float32", dtype="float32"),
    HyperCase(2, 40, iterations=3, stream_dtype="float32", dtype="float32"),
    HyperCase(4, 64, stream_dtype="float32"),
    HyperCase(4, 64),
)

MIX = Op(
    name="hc.mix",
    doc="""What a sublayer reads of the S streams, and how its output will be mixed back.

    All in fp32. z = the row's streams, one after the other, divided by
    sqrt(mean of squares + norm_eps); m = fn z, of which a, b are S numbers each and C is S x S,
    row by row.

    * pre = sigmoid(a * scale[0] + base[a]) + eps
    * post = 2 sigmoid(b * scale[1] + base[b])
    * comb = softmax of each row of (C * scale[2] + base[C]), + eps; divided by (column sums + eps);
      then `iterations` - 1 times: divided by (row sums + eps), divided by (column sums + eps)
    * u = sum over streams i of pre[i] * stream[i]

    Source: DeepSeek-V4's manifold-constrained hyper-connections.

    Prepared from:
        fn_MK: fp32 [(2 + S) S, S D].
        base_M: fp32 [(2 + S) S].
        scale_3: fp32 [3].

    Arguments:
        streams_TSD: [T, S, D] in the case's stream_dtype, dense.

    Returns:
        u_TD: [T, D] in the case's dtype.
        post_TS: fp32 [T, S].
        comb_TSS: fp32 [T, S, S]; first index the source stream.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_mix_cost,
    tolerance=Tolerance(bfloat16=1e-2),
    weights=("fn_MK", "base_M", "scale_3"),
)

EXPAND = Op(
    name="hc.expand",
    doc="""Writes a sublayer's output back into the S streams.

    stream'[j] = post[j] * y + sum over streams i of comb[i, j] * stream[i], in fp32. Mind the
    transpose: the first index of comb is the source.

    Arguments:
        streams_TSD: [T, S, D] in the case's stream_dtype, dense. May be overwritten.
        y_TD: fp32 or bf16 [T, D].
        post_TS: fp32 [T, S].
        comb_TSS: fp32 [T, S, S].

    Returns:
        streams_TSD: [T, S, D] in the case's stream_dtype; may share the memory of the argument.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_expand_cost,
    tolerance=Tolerance(bfloat16=1e-2),
)

HEAD = Op(
    name="hc.head",
    doc="""Collapses the S streams before the last norm.

    z as in `hc.mix`; pre = sigmoid((fn z) * scale + base) + eps; x = sum over i of
    pre[i] * stream[i], in fp32.

    Prepared from:
        fn_SK: fp32 [S, S D].
        base_S: fp32 [S].
        scale_1: fp32 [1].

    Arguments:
        streams_TSD: [T, S, D] in the case's stream_dtype, dense.

    Returns:
        x_TD: [T, D] in the case's dtype.
    """,
    cases=_CASES,
    small_cases=_SMALL,
    cost=_head_cost,
    tolerance=Tolerance(bfloat16=1e-2),
    weights=("fn_SK", "base_S", "scale_1"),
)

OPS = (MIX, EXPAND, HEAD)
