"""Kernels to record and to compile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["gap"])
def everything(
    x_ptr,
    y_ptr,
    rows,
    width,
    gap,
    wide: tl.int64,
    factor,
    flag,
    share: tl.float32,
    maybe_ptr,
    BLOCK: tl.constexpr,
    TWICE: tl.constexpr = False,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + at * gap + wide, at < rows * width, 0.0) * factor + share
    if maybe_ptr is not None:
        values += tl.load(maybe_ptr + at)
    if TWICE:
        values *= 2
    tl.store(y_ptr + at, values, (at < rows * width) & flag)


@triton.jit
def product(a_ptr, b_ptr, c_ptr, K, TYPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """[M, K] x [N, K] -> fp32 [M, N] by one program; bytes are taken as TYPE where one is given."""
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, 64)
    sums = tl.zeros((M, N), tl.float32)
    for k in range(0, K, 64):
        a = tl.load(a_ptr + rows[:, None] * K + k + inner[None, :])
        b = tl.load(b_ptr + columns[None, :] * K + k + inner[:, None])
        if TYPE is not None:
            a, b = a.to(TYPE, bitcast=True), b.to(TYPE, bitcast=True)
        sums = tl.dot(a, b, sums)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], sums)
