"""Contracts of index keys and queries in the formats that the indexer multiplies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op
from metainfer.ops.formats import INDEX_FORMATS


@dataclass(frozen=True, slots=True)
class IndexWriteCase:
    """Attributes:
    format: a name of `INDEX_FORMATS`.
    width: I.
    norm: "rms", "layer" (with a bias), or "" for none.
    eps: added to the mean square or the variance.
    rope_width: R, how many channels are rotated; 0 for none.
    interleaved, leading: as those of `rope.RotateCase`.
    hadamard: whether keys are multiplied by the Hadamard matrix.
    dtype: format of x.
    """

    format: str
    width: int = 128
    norm: str = ""
    eps: float = 1e-6
    rope_width: int = 0
    interleaved: bool = True
    leading: bool = False
    hadamard: bool = True
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class IndexEncodeCase:
    """Attributes:
    format: a name of `INDEX_FORMATS`.
    heads, width: H and I.
    rope_width: R, how many channels of each head are rotated; 0 for none.
    interleaved, leading: as those of `rope.RotateCase`.
    hadamard: whether queries are multiplied by the Hadamard matrix.
    dtype: format of q.
    """

    format: str
    heads: int
    width: int = 128
    rope_width: int = 0
    interleaved: bool = True
    leading: bool = False
    hadamard: bool = True
    dtype: str = "bfloat16"


def _key_bytes(case: IndexWriteCase | IndexEncodeCase) -> float:
    form = INDEX_FORMATS[case.format]
    return ELEMENT_BYTES[case.dtype] * case.width + form.code_bytes + form.scale_bytes


def _write_cost(case: IndexWriteCase, load: Load) -> Cost:
    row = _key_bytes(case) + 8 + 4 * case.rope_width
    return Cost(16.0 * load.rows * case.width, load.rows * row)


def _encode_cost(case: IndexEncodeCase, load: Load) -> Cost:
    keys = load.rows * case.heads
    moved = keys * _key_bytes(case) + 4 * load.rows * case.rope_width
    return Cost(10.0 * keys * case.width, moved)


_HADAMARD = """the Hadamard matrix H (entries 1 and -1, H[i, j] = (-1)^(number of bits
    that i and j share)) and I^-0.5, in fp32"""

_V4_KEY = IndexWriteCase("index_fp4")
_V41_KEY = IndexWriteCase("index_fp4", norm="rms", eps=1e-20, rope_width=64, hadamard=False)
_GLM_KEY = IndexWriteCase("index_fp8", norm="layer", rope_width=64, leading=True)
_V32_KEY = replace(_GLM_KEY, interleaved=False)

WRITE = Op(
    name="cache.write_index",
    doc=f"""Norms, rotates and encodes index keys and writes them to rows of a cache.

    As far as the case asks: RMS norm, or layer norm with a bias, rounded to the case's dtype;
    `rope.rotate`, rounded; times {_HADAMARD};
    then the encoding of `ops/formats.py`.

    Arguments:
        x_TI: [T, I] in the case's dtype; rows may lie apart.
        weight_I: fp32 [I], or None without norm.
        bias_I: fp32 [I], or None but for the layer norm.
        rotation_TR2: fp32 [T, R / 2, 2], cosine and sine of each row's angles; None without rope.
        codes_MC, scales_MS: uint8, the cache; written at the rows that are listed, nowhere else.
        rows_T: int64 [T], the cache row of each key; -1 for none. A row that several name holds
            anything afterwards: those that are read later are named once.

    Returns:
        codes_MC, scales_MS themselves.
    """,
    cases={
        "deepseek-v4-flash": (_V4_KEY, replace(_V4_KEY, format="index_fp8")),
        "deepseek-v4.1-flash": (_V41_KEY, replace(_V41_KEY, format="index_fp8")),
        "deepseek-v3.2": (_V32_KEY,),
        "glm-5.3": (_GLM_KEY,),
        "pebble": (_V4_KEY, replace(_V4_KEY, format="index_fp8")),
    },
    small_cases=(
        _V4_KEY,
        replace(_V4_KEY, format="index_fp8"),
        _V41_KEY,
        _GLM_KEY,
        _V32_KEY,
        replace(_V32_KEY, format="index_fp4", dtype="float32"),
        IndexWriteCase("index_fp8", hadamard=False, dtype="float32"),
    ),
    cost=_write_cost,
)

_V4_QUERY = IndexEncodeCase("index_fp4", 64, rope_width=64)
_V32_QUERY = IndexEncodeCase("index_fp8", 64, rope_width=64, interleaved=False, leading=True)

ENCODE_QUERIES = Op(
    name="index.encode_queries",
    doc=f"""Rotates and encodes index queries, in the format of the keys.

    As far as the case asks: `rope.rotate`, rounded to the case's dtype; times
    {_HADAMARD}; then the encoding of `ops/formats.py`.

    Arguments:
        q_THI: [T, H, I] in the case's dtype; heads and columns dense, rows may lie apart.
        rotation_TR2: fp32 [T, R / 2, 2], cosine and sine of each row's angles; None without rope.

    Returns:
        codes_THC, scales_THS: uint8, new, dense.
    """,
    cases={
        "deepseek-v4-flash": (_V4_QUERY, replace(_V4_QUERY, format="index_fp8")),
        "deepseek-v4.1-flash": (
            replace(_V4_QUERY, heads=32, hadamard=False),
            replace(_V4_QUERY, format="index_fp8", heads=32, hadamard=False),
        ),
        "deepseek-v3.2": (_V32_QUERY,),
        "glm-5.3": (replace(_V32_QUERY, heads=32, interleaved=True),),
        "pebble": (_V4_QUERY, replace(_V4_QUERY, format="index_fp8")),
    },
    small_cases=(
        replace(_V4_QUERY, heads=3),
        replace(_V4_QUERY, format="index_fp8", heads=4, hadamard=False),
        replace(_V32_QUERY, heads=2),
        replace(_V32_QUERY, heads=5, format="index_fp4", interleaved=True),
        IndexEncodeCase("index_fp4", 2, dtype="float32"),
    ),
    cost=_encode_cost,
)

OPS = (WRITE, ENCODE_QUERIES)
