"""Contracts of the hyper-connections: S residual streams, mixed around every sublayer."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance
from metainfer.ops.formats import SCALE_BYTES
from metainfer.ops.norm import RmsNormFp8Case


@dataclass(frozen=True, slots=True)
class HyperCase:
    """Attributes:
    streams, width: S and D.
    iterations: rounds of Sinkhorn's normalisation.
    eps: added where the contract says so.
    norm_eps: added to the mean square of a row's streams.
    stream_dtype: format of the streams, "float32" or "bfloat16".
    dtype: format of the sublayer's input.
    normed: whether `hc.mix_shifted` and `hc.collapse` also norm what they collapse.
    """

    streams: int
    width: int
    iterations: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-6
    stream_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    normed: bool = False

    @property
    def mixes(self) -> int:
        """Rows of fn: a and b of S numbers, C of S x S."""
        return (2 + self.streams) * self.streams


@dataclass(frozen=True, slots=True)
class ExpandMixFp8Case:
    """Attributes:
    hyper: of `hc.expand` and `hc.mix`; its norm_eps is also that of the norm.
    group, scale: of codes, as in `norm.rms_norm_fp8`.
    """

    hyper: HyperCase
    group: int = 128
    scale: str = "e8m0"

    @property
    def norm(self) -> RmsNormFp8Case:
        hyper = self.hyper
        return RmsNormFp8Case(
            hyper.width, hyper.norm_eps, self.group, self.scale, normed=True, dtype=hyper.dtype
        )

    @property
    def dtype(self) -> str:
        return self.hyper.dtype


def _mix_cost(case: HyperCase, load: Load) -> Cost:
    return _collapse_cost(case, load, case.mixes)


def _head_cost(case: HyperCase, load: Load) -> Cost:
    return _collapse_cost(case, load, case.streams)


def _plain_cost(case: HyperCase, load: Load) -> Cost:
    return _collapse_cost(case, load, 0)


def _collapse_cost(case: HyperCase, load: Load, mixes: int) -> Cost:
    """Streams read once, fn (fp32, `mixes` rows) read once, one row of D written."""
    row = case.streams * case.width
    moved = load.rows * row * ELEMENT_BYTES[case.stream_dtype] + 4 * mixes * row
    moved += load.rows * case.width * ELEMENT_BYTES[case.dtype]
    return Cost(2.0 * load.rows * row * (mixes + 2), moved)


def _expand_cost(case: HyperCase, load: Load) -> Cost:
    elements = load.rows * case.streams * case.width
    moved = 2 * elements * ELEMENT_BYTES[case.stream_dtype]
    moved += load.rows * case.width * ELEMENT_BYTES[case.dtype]
    return Cost(2.0 * elements * (case.streams + 1), moved)


def _expand_mix_cost(case: ExpandMixFp8Case, load: Load) -> Cost:
    """The streams are read and written once, and what is made of them is written."""
    hyper = case.hyper
    elements = load.rows * hyper.streams * hyper.width
    y = load.rows * hyper.width * ELEMENT_BYTES[hyper.dtype]
    mixed = _mix_cost(hyper, load)
    moved = mixed.bytes + elements * ELEMENT_BYTES[hyper.stream_dtype] + y
    codes = 1 + SCALE_BYTES[case.scale] / case.group
    return Cost(
        mixed.flops + 2.0 * elements * (hyper.streams + 1),
        moved + load.rows * hyper.width * codes,
    )


_V4 = {
    "deepseek-v4-flash": (HyperCase(4, 4096),),
    "pebble": (HyperCase(4, 256),),
}
_V41 = {"deepseek-v4.1-flash": (HyperCase(4, 5120, norm_eps=1e-20, normed=True),)}
_SMALL = (
    HyperCase(4, 24, stream_dtype="float32", dtype="float32"),
    HyperCase(2, 40, iterations=3, stream_dtype="float32", dtype="float32"),
    HyperCase(4, 64, iterations=4, stream_dtype="float32"),
    HyperCase(4, 64),
)
_SMALL_SHIFTED = (
    HyperCase(
        4, 24, iterations=4, norm_eps=1e-20, stream_dtype="float32", dtype="float32", normed=True
    ),
    HyperCase(2, 40, iterations=3, stream_dtype="float32", dtype="float32"),
    HyperCase(4, 80, norm_eps=1e-20, normed=True),
    HyperCase(4, 64, iterations=4),
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
    cases=_V4,
    small_cases=_SMALL,
    cost=_mix_cost,
    tolerance=Tolerance(bfloat16=1e-2),
    weights=("fn_MK", "base_M", "scale_3"),
)

MIX_NORM = Op(
    name="hc.mix_norm",
    doc="""`hc.mix`, and what it collapsed normed with the sublayer's weight.

    u rounded to the case's dtype, then `norm.rms_norm` with the case's norm_eps: x is what the two
    ops one after the other return.

    Prepared from:
        fn_MK, base_M, scale_3: as in `hc.mix`.
        norm_weight_D: fp32 [D].

    Arguments:
        streams_TSD: [T, S, D] in the case's stream_dtype, dense.

    Returns:
        x_TD: [T, D] in the case's dtype.
        post_TS: fp32 [T, S].
        comb_TSS: fp32 [T, S, S]; first index the source stream.
    """,
    cases=_V4,
    small_cases=_SMALL,
    cost=_mix_cost,
    tolerance=Tolerance(bfloat16=2e-2),
    weights=("fn_MK", "base_M", "scale_3", "norm_weight_D"),
)

MIX_SHIFTED = Op(
    name="hc.mix_shifted",
    doc="""`hc.mix` that collapses with the weights of the sublayer before (DeepSeek-V4.1).

    pre, post and comb of these streams are as in `hc.mix`; u = sum over streams i of
    given[i] * stream[i], which needs not wait for them. Where the case is `normed`, u is rounded
    and normed as in `hc.mix_norm`. The first sublayer of a model is given (1, 0, .. 0).

    Prepared from:
        fn_MK, base_M, scale_3: as in `hc.mix`.
        norm_weight_D: fp32 [D]; None where the case is not `normed`.

    Arguments:
        streams_TSD: [T, S, D] in the case's stream_dtype, dense.
        given_TS: fp32 [T, S], pre of the sublayer before.

    Returns:
        u_TD: [T, D] in the case's dtype.
        pre_TS, post_TS: fp32 [T, S].
        comb_TSS: fp32 [T, S, S]; first index the source stream.
    """,
    cases=_V41,
    small_cases=_SMALL_SHIFTED,
    cost=_mix_cost,
    tolerance=Tolerance(bfloat16=2e-2),
    weights=("fn_MK", "base_M", "scale_3", "norm_weight_D"),
)

COLLAPSE = Op(
    name="hc.collapse",
    doc="""Collapses the S streams with given weights, as V4.1 does before its head.

    u = sum over streams i of given[i] * stream[i], in fp32; where the case is `normed`, rounded and
    normed as in `hc.mix_norm`.

    Prepared from:
        norm_weight_D: fp32 [D]; None where the case is not `normed`.

    Arguments:
        streams_TSD: [T, S, D] in the case's stream_dtype, dense.
        given_TS: fp32 [T, S].

    Returns:
        u_TD: [T, D] in the case's dtype.
    """,
    cases=_V41,
    small_cases=_SMALL_SHIFTED,
    cost=_plain_cost,
    tolerance=Tolerance(bfloat16=2e-2),
    weights=("norm_weight_D",),
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
        more_TD: fp32 or bf16 [T, D], added to y in fp32 before anything else; None for nothing.

    Returns:
        streams_TSD: [T, S, D] in the case's stream_dtype; may share the memory of the argument.
    """,
    cases={**_V4, **_V41},
    small_cases=(*_SMALL, HyperCase(4, 80)),
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
    cases=_V4,
    small_cases=_SMALL,
    cost=_head_cost,
    tolerance=Tolerance(bfloat16=1e-2),
    weights=("fn_SK", "base_S", "scale_1"),
)

EXPAND_MIX_FP8 = Op(
    name="hc.expand_mix_fp8",
    doc="""From a sublayer to the next: `hc.expand` of what the one gave, `hc.mix` of what the other
    reads, and `norm.rms_norm_fp8` of that, with the norm's rows.

    Each as its contract says, one after the other; the streams are rounded to their format before
    they are mixed. Before the first sublayer there is nothing to expand.

    Prepared from:
        fn_MK, base_M, scale_3: as in `hc.mix`, of the sublayer that reads.
        norm_weight_D: fp32 [D].

    Arguments:
        streams_TSD: [T, S, D] in the case's stream_dtype, dense. May be overwritten.
        y_TD: fp32 or bf16 [T, D]; rows may lie apart. None where there is nothing to expand.
        post_TS, comb_TSS: fp32 [T, S] and [T, S, S], as `hc.expand` takes them; None with y.
        more_TD: as in `hc.expand`.

    Returns:
        codes_TD, scales_TG, x_TD: as `norm.rms_norm_fp8` returns them, normed rows last.
        streams_TSD: in the case's stream_dtype; may share the memory of the argument.
        post_TS: fp32 [T, S].
        comb_TSS: fp32 [T, S, S]; first index the source stream.
    """,
    cases={
        "deepseek-v4-flash": (ExpandMixFp8Case(HyperCase(4, 4096)),),
        "pebble": (ExpandMixFp8Case(HyperCase(4, 256)),),
    },
    small_cases=(
        ExpandMixFp8Case(
            HyperCase(4, 96, stream_dtype="float32", dtype="float32"), group=32, scale="fp32"
        ),
        ExpandMixFp8Case(HyperCase(2, 128, iterations=3, stream_dtype="float32")),
        ExpandMixFp8Case(HyperCase(4, 384, iterations=4)),
        ExpandMixFp8Case(HyperCase(4, 64), group=32),
    ),
    cost=_expand_mix_cost,
    tolerance=Tolerance(bfloat16=2e-2),
    weights=("fn_MK", "base_M", "scale_3", "norm_weight_D"),
)

OPS = (MIX, MIX_NORM, MIX_SHIFTED, EXPAND, COLLAPSE, HEAD, EXPAND_MIX_FP8)
