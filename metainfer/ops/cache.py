"""Contracts of writing latents and entries to a cache in its format, and of reading them back."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.ops.base import ELEMENT_BYTES, Cost, Load, Op, Tolerance
from metainfer.ops.formats import FORMATS

DENSE = "dense"


@dataclass(frozen=True, slots=True)
class CacheWriteCase:
    """Attributes:
    format: a name of `FORMATS`, or "dense" for a cache of plain numbers.
    width: D.
    rope_width: R, how many of the last channels are rotated; 0 for none.
    norm: "rms" or "" for none.
    norm_width: how many of the first channels are normed; 0 for all.
    eps: added to the mean square.
    dtype: format of x and of the result.
    """

    format: str
    width: int
    rope_width: int = 0
    norm: str = ""
    norm_width: int = 0
    eps: float = 1e-6
    dtype: str = "bfloat16"

    @property
    def normed(self) -> int:
        """Channels that are normed."""
        return (self.norm_width or self.width) if self.norm else 0


@dataclass(frozen=True, slots=True)
class CacheReadCase:
    """Attributes:
    format: a name of `FORMATS`.
    dtype: of the result.
    """

    format: str
    dtype: str = "bfloat16"


def _cost(case: CacheWriteCase, load: Load) -> Cost:
    size = ELEMENT_BYTES[case.dtype]
    kept = size * case.width if case.format == DENSE else FORMATS[case.format].row_bytes
    row = 2.0 * size * case.width + kept + 8 + 4 * case.rope_width
    return Cost(8.0 * load.rows * case.width, load.rows * row)


def _read_cost(case: CacheReadCase, load: Load) -> Cost:
    form = FORMATS[case.format]
    row = form.row_bytes + 8 + ELEMENT_BYTES[case.dtype] * form.width
    return Cost(1.0 * load.rows * form.coded, load.rows * row)


_V4 = CacheWriteCase("v4_fp8", 512, 64, "rms")
_V4_ENTRIES = CacheWriteCase("v4_fp8", 512)

WRITE = Op(
    name="cache.write",
    doc="""Norms and rotates latents, writes them to rows of a cache, and returns them as the cache
    keeps them: prefill attends to what decode will read.

    As far as the case asks: `norm.rms_norm` of the first channels, rounded to the case's dtype;
    `rope.rotate` of the last channels, rounded; then the encoding of `ops/formats.py`. A dense
    cache rounds to its own dtype.

    Arguments:
        x_TD: [T, D] in the case's dtype; rows may lie apart.
        weight_D: fp32, as many as channels are normed; None without norm.
        rotation_TR2: fp32 [T, R / 2, 2], cosine and sine of each row's angles; None without rope.
        cache: uint8 [M, row_bytes], rows a multiple of 16 bytes apart; or fp32 or bf16 [M, D] where
            dense. Written, padding included, at the rows that are listed and nowhere else.
        rows_T: int64 [T], the cache row of each row; -1 for none. A row that several name holds
            anything afterwards: those that are read later are named once.

    Returns:
        y_TD: new, in the case's dtype, dense: every row as the cache keeps it, or would.
    """,
    cases={
        "deepseek-v4-flash": (
            _V4,
            _V4_ENTRIES,
            CacheWriteCase("dense", 512, 64, "rms"),
            CacheWriteCase("dense", 512),
        ),
        "deepseek-v4.1-flash": (
            CacheWriteCase("v41_fp8", 512, 64, "rms", eps=1e-20),
            CacheWriteCase("v41_fp4", 512, 64),
            CacheWriteCase("dense", 512, 64, "rms", eps=1e-20),
            CacheWriteCase("dense", 512, 64),
        ),
        "deepseek-v3.2": (
            CacheWriteCase("mla_fp8", 576, 64, "rms", norm_width=512),
            CacheWriteCase("dense", 576, 64, "rms", norm_width=512),
        ),
        "glm-5.3": (
            CacheWriteCase("mla_fp8", 576, 64, "rms", norm_width=512, eps=1e-5),
            CacheWriteCase("dense", 576, 64, "rms", norm_width=512, eps=1e-5),
        ),
        "pebble": (_V4, _V4_ENTRIES),
    },
    small_cases=(
        _V4,
        _V4_ENTRIES,
        CacheWriteCase("v4_fp8", 512, 32, "rms", dtype="float32"),
        CacheWriteCase("v41_fp8", 512, 64, "rms", eps=1e-20),
        CacheWriteCase("v41_fp4", 512, 64),
        CacheWriteCase("v41_fp4", 512, dtype="float32"),
        CacheWriteCase("mla_fp8", 576, 64, "rms", norm_width=512),
        CacheWriteCase("mla_fp8", 576, 64, dtype="float32"),
        CacheWriteCase("dense", 40, 8, "rms", norm_width=24, dtype="float32"),
        CacheWriteCase("dense", 64, 16),
    ),
    cost=_cost,
    tolerance=Tolerance(bfloat16=1.5e-2),
)

_V4_READ = CacheReadCase("v4_fp8")

READ = Op(
    name="cache.read",
    doc="""Reads rows of a cache as numbers: a chunk of prefill needs the latents before it.

    Arguments:
        cache: uint8 [M, row_bytes], rows a multiple of 16 bytes apart.
        rows_T: int64 [T], rows of the cache, in any order and any number of times.

    Returns:
        y_TD: new, [T, width of the format] in the case's dtype, dense: what `cache.write` returned
            when it wrote these rows.
    """,
    cases={
        "deepseek-v4-flash": (_V4_READ,),
        "deepseek-v4.1-flash": (CacheReadCase("v41_fp8"),),
        "pebble": (_V4_READ,),
    },
    small_cases=(
        _V4_READ,
        CacheReadCase("v4_fp8", "float32"),
        CacheReadCase("v41_fp8"),
        CacheReadCase("v41_fp4", "float32"),
        CacheReadCase("mla_fp8"),
    ),
    cost=_read_cost,
    tolerance=Tolerance(float32=0.0, bfloat16=0.0),
)

OPS = (WRITE, READ)
