"""Compressors in Triton: an entry's tokens are read once, pooled channel by channel as they come,
and the entry is normed, rotated and written in the same pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.rows import rounded, turned
from metainfer.ops.compress import CompressCase

_TILE = 4096  # values that a program takes in at once; twice as many numbers with the scores
_LONG_TILE = 16384  # the same for entries of many tokens, of which there are few
_PER_THREAD = 32  # values of a thread


class Tile(NamedTuple):
    """Entries of a program, tokens of one round, and warps."""

    entries: int
    tokens: int
    warps: int


def tile_of(case: CompressCase, entries: int, multiprocessors: int) -> Tile:
    """One way where entries are many, one where they are few."""
    width = triton.next_power_of_2(case.width)
    span = triton.next_power_of_2(case.span)
    tokens = min(span, max(1, (_TILE if span * width <= _TILE else _LONG_TILE) // width))
    each = max(1, _TILE // (tokens * width)) if tokens == span else 1
    if entries < each * 2 * multiprocessors:
        each = 1
    return Tile(each, tokens, max(1, min(16, each * tokens * width // (32 * _PER_THREAD))))


@triton.jit(do_not_specialize=["entries", "first_window"])
def pool_windows(
    rows, listed, norm_weight, rotation, out, entries, first_window, row_stride, eps,
    RATIO: tl.constexpr, SPAN: tl.constexpr, OVERLAP: tl.constexpr, D: tl.constexpr,
    ROPE: tl.constexpr, E: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Program (E entries), S tokens at a time. Suffixes: E entries, S tokens, D channels.

    Args:
        listed: int64 [entries, SPAN], row of each token or -1; None: windows follow each other.
    """
    e_E, d_D = tl.program_id(0) * E + tl.arange(0, E), tl.arange(0, BD)
    is_entry_E, is_channel_D = e_E < entries, d_D < D
    top_ED = tl.full([E, BD], float("-inf"), tl.float32)
    mass_ED = tl.zeros([E, BD], tl.float32)
    acc_ED = tl.zeros([E, BD], tl.float32)
    for first in range(0, SPAN, S):
        s_S = first + tl.arange(0, S)
        there_ES = is_entry_E[:, None] & (s_S < SPAN)[None, :]
        if LISTED:
            list_at_ES = listed + e_E.to(tl.int64)[:, None] * SPAN + s_S[None, :]
            row_ES = tl.load(list_at_ES, mask=there_ES, other=-1)
            there_ES = there_ES & (row_ES >= 0)
        else:
            row_ES = e_E.to(tl.int64)[:, None] * RATIO + s_S[None, :]
            if OVERLAP:
                there_ES = there_ES & ((first_window + e_E > 0)[:, None] | (s_S >= RATIO)[None, :])
        half_S = tl.where(s_S < RATIO, 0, D) if OVERLAP else tl.zeros([S], tl.int32)
        at_ESD = rows + (row_ES * row_stride + half_S[None, :])[:, :, None] + d_D[None, None, :]
        mask_ESD = there_ES[:, :, None] & is_channel_D[None, None, :]
        score_at_ESD = at_ESD + (2 * D if OVERLAP else D)
        score_ESD = tl.load(score_at_ESD, mask=mask_ESD, other=float("-inf"))
        value_ESD = tl.load(at_ESD, mask=mask_ESD, other=0.0)
        new_ED = tl.maximum(top_ED, tl.max(score_ESD, 1))
        base_ED = tl.where(new_ED == float("-inf"), 0.0, new_ED)
        share_ESD = tl.exp(score_ESD - base_ED[:, None, :])
        kept_ED = tl.exp(top_ED - base_ED)
        mass_ED = mass_ED * kept_ED + tl.sum(share_ESD, 1)
        acc_ED = acc_ED * kept_ED + tl.sum(share_ESD * value_ESD, 1)
        top_ED = new_ED
    # Without tokens there is no mass, and the sum is 0.
    pooled_ED = rounded(acc_ED / tl.where(mass_ED == 0.0, 1.0, mass_ED), out)
    inverse_E = tl.rsqrt(tl.sum(pooled_ED * pooled_ED, 1) / D + eps)
    weight_D = tl.load(norm_weight + d_D, mask=is_channel_D, other=0.0)
    entry_ED = pooled_ED * inverse_E[:, None] * weight_D[None, :]
    if ROPE:
        entry_ED = rounded(entry_ED, out)
        entry_ED = turned(entry_ED, rotation, e_E, is_entry_E, E, BD, D - ROPE, ROPE, False)
    to_ED = out + e_E.to(tl.int64)[:, None] * D + d_D[None, :]
    mask_ED = is_entry_E[:, None] & is_channel_D[None, :]
    tl.store(to_ED, rounded(entry_ED, out).to(out.dtype.element_ty), mask=mask_ED)


def compress(
    launch: Launcher,
    case: CompressCase,
    rows_NW: torch.Tensor,
    first_window: int,
    norm_weight_D: torch.Tensor,
    rotation_ER2: torch.Tensor,
) -> torch.Tensor:
    return _pool(launch, case, rows_NW, None, first_window, norm_weight_D, rotation_ER2)


def compress_decode(
    launch: Launcher,
    case: CompressCase,
    ring_NW: torch.Tensor,
    ring_rows_CS: torch.Tensor,
    norm_weight_D: torch.Tensor,
    rotation_CR2: torch.Tensor,
) -> torch.Tensor:
    rows_CS = ring_rows_CS.contiguous()
    return _pool(launch, case, ring_NW, rows_CS, 0, norm_weight_D, rotation_CR2)


def _pool(
    launch: Launcher,
    case: CompressCase,
    rows_NW: torch.Tensor,
    listed_ES: torch.Tensor | None,
    first_window: int,
    norm_weight_D: torch.Tensor,
    rotation_ER2: torch.Tensor,
) -> torch.Tensor:
    entries = len(rotation_ER2)
    entries_ED = rows_NW.new_empty(entries, case.width, dtype=TORCH_DTYPES[case.dtype])
    tile = tile_of(case, entries, launch.multiprocessors)
    launch(
        pool_windows,
        (triton.cdiv(entries, tile.entries),),
        rows_NW,
        listed_ES,
        norm_weight_D,
        rotation_ER2.contiguous() if case.rope_width else None,
        entries_ED,
        entries,
        first_window,
        rows_NW.stride(0),
        case.eps,
        num_warps=tile.warps,
        RATIO=case.ratio,
        SPAN=case.span,
        OVERLAP=case.overlap,
        D=case.width,
        ROPE=case.rope_width,
        E=tile.entries,
        S=tile.tokens,
        BD=triton.next_power_of_2(case.width),
        LISTED=listed_ES is not None,
    )
    return entries_ED


BACKENDS = (
    Declared("attention.compress", compress),
    Declared("attention.compress_decode", compress_decode),
)
