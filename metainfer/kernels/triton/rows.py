"""Rows of channels in kernels: tiles [ROWS, BLOCK] of fp32 in registers, and how many rows a
program takes.

A row is one head of one token; BLOCK is the width of a row, rounded up to a power of two, channels
beyond the width are zero. Kernels load a tile once, do all that their case asks, and store it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.codes import as_bits, as_float
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2

_BUSY = 4  # programs a multiprocessor, from which on there are many

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True, slots=True)
class Share:
    """What a program gets.

    Attributes:
        numbers: of its rows, at least; a row is not divided.
        per_thread: how many of them each thread holds.
    """

    numbers: int
    per_thread: int


FEW = Share(1024, 8)
"""Where rows are few: little for each to wait for."""
MANY = Share(4096, 32)
"""Where rows are many: enough on the way from memory at a time."""


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
    block = next_power_of_2(width)
    share, each = MANY, max(least, MANY.numbers // block)
    if rows < each * _BUSY * launch.multiprocessors:
        share, each = FEW, max(least, FEW.numbers // block)
    warps = max(1, min(8, each * block // (32 * share.per_thread)))
    return RowTile(each, block, cdiv(rows, each), warps)


@triton.jit
def rounded(x, pointer):
    """fp32 -> fp32 as the type that a pointer points to holds it."""
    if pointer.dtype.element_ty == tl.bfloat16:
        return rounded_to_bf16(x)
    else:
        return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def rounded_to_bf16(x):
    """fp32 -> fp32 as bf16 holds it."""
    if _INTERPRETED:
        # The interpreter cuts off instead.
        bits = as_bits(x)
        nearest = as_float((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000)
        return tl.where(tl.abs(x) <= 3.4028235e38, nearest, x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def rms_normed(x, weight_ptr, eps, channel, NORMED: tl.constexpr):
    """The first NORMED channels over their root mean square, times a weight if there is one.

    Args:
        channel: [1, BLOCK], which channel each column holds; all channels of a row are there once.
    """
    inside = channel < NORMED
    squares = tl.where(inside, x * x, 0.0)
    y = x * tl.rsqrt(tl.sum(squares, 1) * (1.0 / NORMED) + eps)[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + channel, inside, other=0.0)
    return tl.where(inside, y, x)


@triton.jit
def layer_normed(x, weight_ptr, bias_ptr, eps, channel, WIDTH: tl.constexpr):
    """The layer norm with weight and bias; `channel` as above."""
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
    INVERSE: tl.constexpr,
):
    """Channels FIRST .. FIRST + ROPE - 1, in pairs side by side, rotated by the angles of each
    row's token; the others as they are.

    Args:
        rotation_ptr: fp32 [T, ROPE / 2, 2], cosine and sine.
        token, ok: [ROWS], the token of each row and whether there is one.
    """
    # Cosine and sine lie as the two channels of a pair do, so both tiles split alike.
    channel = tl.arange(0, BLOCK)
    inside = (channel >= FIRST) & (channel < FIRST + ROPE)
    place = token[:, None] * ROPE + (channel - FIRST)[None, :]
    angle = tl.load(rotation_ptr + place, ok[:, None] & inside[None, :], other=0.0)
    cos, sin = tl.split(tl.reshape(angle, (ROWS, BLOCK // 2, 2)))
    one, other = tl.split(tl.reshape(x, (ROWS, BLOCK // 2, 2)))
    if INVERSE:
        sin = -sin
    pair = 2 * tl.arange(0, BLOCK // 2)
    rotates = ((pair >= FIRST) & (pair < FIRST + ROPE))[None, :]
    y_one = tl.where(rotates, one * cos - other * sin, one)
    y_other = tl.where(rotates, other * cos + one * sin, other)
    return tl.reshape(tl.join(y_one, y_other), (ROWS, BLOCK))


@triton.jit
def partners(BLOCK: tl.constexpr, ROPE: tl.constexpr):
    """int32 [1, BLOCK]: the other channel of each channel's pair where pairs are halves of the ROPE
    channels that are rotated, from a multiple of ROPE on. Neighbours have neighbours."""
    HALF: tl.constexpr = ROPE // 2
    other = tl.arange(0, BLOCK) ^ HALF
    return tl.max_contiguous(tl.multiple_of(other, HALF), HALF)[None, :]


@triton.jit
def halves_turned(
    x,
    partner,
    rotation_ptr,
    token,
    ok,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    ROPE: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """As `turned`, for pairs (k, k + ROPE / 2).

    Args:
        partner: x of each channel's partner, a tile of its own.
        rotation_ptr: int64 [T, ROPE / 2], the same cosines and sines, two in a number.
    """
    HALF: tl.constexpr = ROPE // 2
    channel = tl.arange(0, BLOCK)
    inside = ((channel >= FIRST) & (channel < FIRST + ROPE))[None, :]
    angle = tl.max_contiguous(tl.multiple_of(channel & (HALF - 1), HALF), HALF)
    place = token[:, None] * HALF + angle[None, :]
    both = tl.load(rotation_ptr + place, ok[:, None] & inside, other=0)
    cos, sin = as_float(both), as_float(both >> 32)
    first = (channel & HALF)[None, :] == 0
    sin = tl.where(first != INVERSE, -sin, sin)
    return tl.where(inside, x * cos + partner * sin, x)


@triton.jit
def _normed(
    x_row,
    channel,
    ok,
    weight_ptr,
    bias_ptr,
    eps,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    NORMED: tl.constexpr,
):
    """The given channels of rows, fp32, normed and rounded."""
    here = ok[:, None] & (channel < WIDTH)
    x = tl.load(x_row[:, None] + channel, here, other=0.0).to(tl.float32)
    if NORM == "rms":
        x = rounded(rms_normed(x, weight_ptr, eps, channel, NORMED), x_row)
    elif NORM == "layer":
        x = rounded(layer_normed(x, weight_ptr, bias_ptr, eps, channel, WIDTH), x_row)
    return x


@triton.jit
def prepared(
    x_row,
    token,
    ok,
    weight_ptr,
    bias_ptr,
    rotation_ptr,
    eps,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    NORMED: tl.constexpr,
    FIRST: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """fp32 [ROWS, BLOCK], rows of x normed and rotated as far as the case asks, rounded to the type
    of x after each.

    Args:
        x_row, token, ok: [ROWS], pointer to each row, its token and whether there is one.
        rotation_ptr: as `turned` or `halves_turned` wants it (`angles` on the host).
        NORM: "rms" of the first NORMED channels, "layer", or "".
        ROPE: channels that are rotated, from FIRST on; 0 for none.
    """
    channel = tl.arange(0, BLOCK)[None, :]
    x = _normed(x_row, channel, ok, weight_ptr, bias_ptr, eps, WIDTH, NORM, NORMED)
    if ROPE and INTERLEAVED:
        y = turned(x, rotation_ptr, token, ok, ROWS, BLOCK, FIRST, ROPE, INVERSE)
        x = rounded(y, x_row)
    elif ROPE:
        other = partners(BLOCK, ROPE)
        partner = _normed(x_row, other, ok, weight_ptr, bias_ptr, eps, WIDTH, NORM, NORMED)
        y = halves_turned(x, partner, rotation_ptr, token, ok, BLOCK, FIRST, ROPE, INVERSE)
        x = rounded(y, x_row)
    return x


def angles(rotation_TR2: torch.Tensor | None, interleaved: bool) -> torch.Tensor | None:
    """The rotation as kernels read it."""
    if rotation_TR2 is None or interleaved:
        return rotation_TR2
    return rotation_TR2.view(torch.int64)


def refused_halves(rope_width: int, width: int) -> str:
    """Why halves of the rotated channels are not where kernels look for them; "" where they are."""
    if rope_width & (rope_width - 1):
        return f"rotates halves of a power of two of channels, not of {rope_width}"
    if width % rope_width:
        return f"rotates halves in rows of a multiple of {rope_width} channels, not of {width}"
    return ""
