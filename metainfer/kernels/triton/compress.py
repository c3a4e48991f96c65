"""Compressors in Triton: an entry's tokens are read once, pooled channel by channel as they come,
and the entry is normed, rotated and written in the same pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2
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
    width = next_power_of_2(case.width)
    span = next_power_of_2(case.span)
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


@triton.jit
def pooled_in_step(
    t, state, bias, phases, ring, ring_rows, listed, state_stride,
    RATIO: tl.constexpr, SPAN: tl.constexpr, OVERLAP: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """fp32 [D], the tokens of row t's window, pooled, S at a time. Tokens of this step are read
    where they come from, for nobody waits until they are in the ring."""
    d_D = tl.arange(0, BD)
    is_channel_D = d_D < D
    top_D = tl.full([BD], float("-inf"), tl.float32)
    mass_D = tl.zeros([BD], tl.float32)
    acc_D = tl.zeros([BD], tl.float32)
    for first in range(0, SPAN, S):
        s_S = first + tl.arange(0, S)
        row_S = tl.load(listed + t * SPAN + s_S, s_S < SPAN, -1)
        there_S = row_S >= 0
        other_S = t - (SPAN - 1 - s_S)  # the row of this token, if it is in this step
        in_step_S = there_S & (other_S >= 0)
        in_step_S = in_step_S & (tl.load(ring_rows + other_S, in_step_S, -1) == row_S)
        phase_S = tl.load(phases + other_S, in_step_S, 0)
        half_S = tl.where(s_S < RATIO, 0, D) if OVERLAP else tl.zeros([S], tl.int32)
        at_SD = half_S[:, None] + d_D[None, :]
        to_scores: tl.constexpr = 2 * D if OVERLAP else D
        kept_SD = (there_S & (in_step_S == 0))[:, None] & is_channel_D[None, :]
        new_SD = in_step_S[:, None] & is_channel_D[None, :]
        ring_SD = ring + (row_S * W)[:, None] + at_SD
        state_SD = state + (other_S * state_stride)[:, None] + at_SD
        bias_SD = bias + (phase_S * W)[:, None] + at_SD
        score_SD = tl.load(ring_SD + to_scores, kept_SD, float("-inf"))
        value_SD = tl.load(ring_SD, kept_SD, 0.0)
        new_score_SD = tl.load(state_SD + to_scores, new_SD, 0.0)
        new_score_SD += tl.load(bias_SD + to_scores, new_SD, 0.0)
        new_value_SD = tl.load(state_SD, new_SD, 0.0) + tl.load(bias_SD, new_SD, 0.0)
        score_SD = tl.where(new_SD, new_score_SD, score_SD)
        value_SD = tl.where(new_SD, new_value_SD, value_SD)
        new_D = tl.maximum(top_D, tl.max(score_SD, 0))
        base_D = tl.where(new_D == float("-inf"), 0.0, new_D)
        share_SD = tl.exp(score_SD - base_D[None, :])
        kept_D = tl.exp(top_D - base_D)
        mass_D = mass_D * kept_D + tl.sum(share_SD, 0)
        acc_D = acc_D * kept_D + tl.sum(share_SD * value_SD, 0)
        top_D = new_D
    return acc_D / tl.where(mass_D == 0.0, 1.0, mass_D)


@triton.jit(do_not_specialize_on_alignment=["state"])
def take_in(
    state, bias, phases, ring, ring_rows, listed, norm_weight, rotation, out, cache, targets,
    state_stride, cache_stride, eps,
    RATIO: tl.constexpr, SPAN: tl.constexpr, OVERLAP: tl.constexpr, W: tl.constexpr,
    BW: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, S: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Program (row): its state into the ring, and the entry of a row that closes a window.
    Suffixes: W numbers of state, S tokens, D channels."""
    t = tl.program_id(0).to(tl.int64)
    w_W, d_D = tl.arange(0, BW), tl.arange(0, BD)
    is_channel_D = d_D < D
    own_W = tl.load(state + t * state_stride + w_W, w_W < W, 0.0)
    own_W += tl.load(bias + tl.load(phases + t) * W + w_W, w_W < W, 0.0)
    tl.store(ring + tl.load(ring_rows + t) * W + w_W, own_W, w_W < W)
    entry_1D = tl.zeros([1, BD], tl.float32)
    if tl.load(listed + t * SPAN + SPAN - 1) >= 0:
        pooled_D = pooled_in_step(
            t, state, bias, phases, ring, ring_rows, listed, state_stride,
            RATIO, SPAN, OVERLAP, W, D, S, BD,
        )  # fmt: skip
        pooled_D = rounded(pooled_D, out)
        inverse = tl.rsqrt(tl.sum(pooled_D * pooled_D, 0) / D + eps)
        weight_D = tl.load(norm_weight + d_D, is_channel_D, 0.0)
        entry_1D = (pooled_D * inverse * weight_D)[None, :]
        if ROPE:
            entry_1D = rounded(entry_1D, out)
            token_1 = t + tl.zeros([1], tl.int64)
            entry_1D = turned(
                entry_1D, rotation, token_1, token_1 >= 0, 1, BD, D - ROPE, ROPE, False
            )
        entry_1D = rounded(entry_1D, out)
        if cache is not None:
            to_1D = cache + tl.load(targets + t) * cache_stride + d_D[None, :]
            kept_1D = rounded(entry_1D, cache).to(cache.dtype.element_ty)
            tl.store(to_1D, kept_1D, is_channel_D[None, :])
    to_1D = out + t * D + d_D[None, :]
    tl.store(to_1D, entry_1D.to(out.dtype.element_ty), is_channel_D[None, :])


def compress_step(
    launch: Launcher,
    case: CompressCase,
    state_TW: torch.Tensor,
    bias_RW: torch.Tensor,
    phase_T: torch.Tensor,
    ring_NW: torch.Tensor,
    ring_rows_T: torch.Tensor,
    closing_TS: torch.Tensor,
    norm_weight_D: torch.Tensor,
    rotation_TR2: torch.Tensor,
    cache_MD: torch.Tensor | None,
    target_rows_T: torch.Tensor,
) -> torch.Tensor:
    rows = len(state_TW)
    entries_TD = state_TW.new_empty(rows, case.width, dtype=TORCH_DTYPES[case.dtype])
    width, span = next_power_of_2(case.width), next_power_of_2(case.span)
    tokens = min(span, max(1, _TILE // width))
    launch(
        take_in,
        (rows,),
        state_TW,
        bias_RW,
        phase_T,
        ring_NW,
        ring_rows_T,
        closing_TS.contiguous(),
        norm_weight_D,
        rotation_TR2.contiguous() if case.rope_width else None,
        entries_TD,
        cache_MD,
        target_rows_T,
        state_TW.stride(0),
        0 if cache_MD is None else cache_MD.stride(0),
        case.eps,
        num_warps=8 if tokens * case.width > 2048 else 4,
        RATIO=case.ratio,
        SPAN=case.span,
        OVERLAP=case.overlap,
        W=case.row_width,
        BW=next_power_of_2(case.row_width),
        D=case.width,
        ROPE=case.rope_width,
        S=tokens,
        BD=width,
    )
    return entries_TD


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
        (cdiv(entries, tile.entries),),
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
        BD=next_power_of_2(case.width),
        LISTED=listed_ES is not None,
    )
    return entries_ED


BACKENDS = (
    Declared("attention.compress", compress),
    Declared("attention.compress_decode", compress_decode),
    Declared("attention.compress_step", compress_step),
)
