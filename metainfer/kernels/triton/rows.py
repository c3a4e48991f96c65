"""Rows of channels in kernels: tiles [ROWS, BLOCK] of fp32 in registers, and how many rows a
program takes.

A row is one head of one token; BLOCK is the width of a row, rounded up to a power of two, channels
beyond the width are zero. Nothing here reads or writes x: kernels load a tile once, do all that
their case asks, and store it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from metainfer.kernels.triton.codes import as_bits, as_float
from metainfer.kernels.triton.launch import Launcher

_FEW, _MANY = 1024, 4096
"""Numbers of one program: little to wait for, or enough to hide the way to memory."""
_FEW_PER_THREAD, _MANY_PER_THREAD = 8, 32
_BUSY = 8  # programs a multiprocessor, from which on there are many

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True, slots=True)
class RowTile:
    """Attributes:
    rows, block: ROWS and BLOCK of a program.
    programs: how many there are.
    num_warps: of a program.
    """

    rows: int
    block: int
    programs: int
    num_warps: int


def row_tile(launch: Launcher, rows: int, width: int, least: int = 1) -> RowTile:
    """How rows are dealt to programs: one way where they are many, one where they are few, so that
    a kernel is compiled twice at most.

    Args:
        rows: of the call.
        width: of a row.
        least: rows that a program must have, a power of two.
    """
    block = triton.next_power_of_2(width)
    each, per_thread = max(least, _MANY // block), _MANY_PER_THREAD
    if rows < each * _BUSY * launch.multiprocessors:
        each, per_thread = max(least, _FEW // block), _FEW_PER_THREAD
    warps = max(1, min(8, each * block // (32 * per_thread)))
    return RowTile(each, block, triton.cdiv(rows, each), warps)


@triton.jit
def rounded(x, pointer):
    """fp32 -> fp32 as the type that a pointer points to holds it."""
    if _INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        # The interpreter cuts off instead.
        bits = as_bits(x)
        nearest = as_float((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000)
        return tl.where(tl.abs(x) <= 3.4028235e38, nearest, x)
    else:
        return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def rms_normed(x, weight_ptr, eps, BLOCK: tl.constexpr, NORMED: tl.constexpr):
    """The first NORMED channels over their root mean square, times a weight if there is one."""
    channel = tl.arange(0, BLOCK)[None, :]
    inside = channel < NORMED
    squares = tl.where(inside, x * x, 0.0)
    y = x * tl.rsqrt(tl.sum(squares, 1) * (1.0 / NORMED) + eps)[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + channel, inside, other=0.0)
    return tl.where(inside, y, x)


@triton.jit
def layer_normed(x, weight_ptr, bias_ptr, eps, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The layer norm with weight and bias."""
    channel = tl.arange(0, BLOCK)[None, :]
    inside = channel < WIDTH
    centred = tl.where(inside, x - (tl.sum(x, 1) * (1.0 / WIDTH))[:, None], 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 1) * (1.0 / WIDTH) + eps)[:, None]
    weight = tl.load(weight_ptr + channel, inside, other=0.0)
    return y * weight + tl.load(bias_ptr + channel, inside, other=0.0)


@triton.jit
def turned(
    x,
    rotation_ptr,
    token,
    ok,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Channels FIRST .. FIRST + ROPE - 1 rotated by the angles of each row's token; the others as
    they are.

    Args:
        rotation_ptr: fp32 [T, ROPE / 2, 2], cosine and sine.
        token, ok: [ROWS], the token of each row and whether there is one.
        INTERLEAVED: pairs are channels side by side; otherwise halves of the rotated channels, of
            which FIRST must be a multiple.
    """
    if INTERLEAVED:
        # Cosine and sine lie as the two channels of a pair do, so both tiles split alike.
        channel = tl.arange(0, BLOCK)
        inside = (channel >= FIRST) & (channel < FIRST + ROPE)
        place = token[:, None] * ROPE + (channel - FIRST)[None, :]
        angle = tl.load(rotation_ptr + place, ok[:, None] & inside[None, :], other=0.0)
        cos, sin = tl.split(tl.reshape(angle, (ROWS, BLOCK // 2, 2)))
        one, other = tl.split(tl.reshape(x, (ROWS, BLOCK // 2, 2)))
        pair = 2 * tl.arange(0, BLOCK // 2)
        rotates = ((pair >= FIRST) & (pair < FIRST + ROPE))[None, :]
    else:
        HALF: tl.constexpr = ROPE // 2
        part = tl.arange(0, BLOCK // ROPE)[None, :, None]
        rotates = part == FIRST // ROPE
        place = token[:, None, None] * ROPE + 2 * tl.arange(0, HALF)[None, None, :]
        cos = tl.load(rotation_ptr + place, ok[:, None, None], other=0.0)
        sin = tl.load(rotation_ptr + place + 1, ok[:, None, None], other=0.0)
        halves = tl.reshape(x, (ROWS, BLOCK // ROPE, 2, HALF))
        one, other = tl.split(tl.permute(halves, (0, 1, 3, 2)))
    if INVERSE:
        sin = -sin
    y_one = tl.where(rotates, one * cos - other * sin, one)
    y_other = tl.where(rotates, other * cos + one * sin, other)
    y = tl.join(y_one, y_other)
    if not INTERLEAVED:
        y = tl.permute(y, (0, 1, 3, 2))
    return tl.reshape(y, (ROWS, BLOCK))
