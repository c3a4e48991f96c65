"""The best plain product that a target's own instructions reach here: the ceiling of its code.

A product of two large matrices, tuned over a handful of tiles; those that do not fit the target's
shared memory are passed over. As the code of sm_89 that is mma.sync within 99 KB.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from metainfer.core.errors import MetainferError
from metainfer.kernels.timing import Stopwatch
from metainfer.kernels.triton.launch import Launcher, has_fp8

_SIZE = 8192
# (rows, columns, inner bytes of a tile, warps, stages)
_TILES = (
    (128, 128, 128, 4, 3),
    (128, 128, 128, 4, 4),
    (128, 128, 64, 4, 4),
    (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 4),
    (128, 256, 128, 8, 3),
)


@triton.jit
def product_kernel(
    a_pointer,
    b_pointer,
    c_pointer,
    rows,
    columns,
    inner,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
):
    """c [rows, columns] = a [rows, inner] times b [columns, inner] transposed; whole tiles alone.
    Programs next to each other share tiles of both in the cache."""
    tiles_across = columns // COLUMNS
    first = tl.program_id(0) // (GROUP * tiles_across) * GROUP
    within = tl.program_id(0) % (GROUP * tiles_across)
    row = (first + within % GROUP) * ROWS + tl.arange(0, ROWS)
    column = (within // GROUP) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    a = a_pointer + row[:, None] * inner + k[None, :]
    b = b_pointer + column[None, :] * inner + k[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, inner, INNER):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += INNER
        b += INNER
    c = c_pointer + row[:, None] * columns + column[None, :]
    tl.store(c, total.to(c_pointer.dtype.element_ty))


def product_rates(launch: Launcher, size: int = _SIZE) -> dict[str, float]:
    """Operations per second of the best tile, by format of the operands."""
    rates = {"bfloat16": _best(launch, torch.bfloat16, size)}
    if has_fp8(launch):
        rates["fp8"] = _best(launch, torch.float8_e4m3fn, size)
    return rates


def _best(launch: Launcher, dtype: torch.dtype, size: int) -> float:
    watch = Stopwatch("cuda")
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    c = torch.empty(size, size, dtype=torch.bfloat16, device="cuda")
    found = []
    for tile in _TILES:
        try:
            found.append(watch.median_s([_product(launch, a, b, c, tile)], budget_s=0.05))
        except (MetainferError, RuntimeError):  # it does not fit or does not compile there
            continue
    if not found:
        raise MetainferError(f"no plain product of {dtype} runs as {launch.capability}")
    return 2.0 * size**3 / min(found)


def _product(
    launch: Launcher, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, tile: tuple[int, ...]
) -> Any:
    rows, columns, inner_bytes, warps, stages = tile
    size = len(a)
    grid = (size // rows * (size // columns),)
    return lambda: launch(
        product_kernel,
        grid,
        a,
        b,
        c,
        size,
        size,
        size,
        ROWS=rows,
        COLUMNS=columns,
        INNER=inner_bytes // a.element_size(),
        GROUP=8,
        num_warps=warps,
        num_stages=stages,
    )
