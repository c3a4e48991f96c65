"""Compressors: the softmax of each entry over its tokens, in tiles of entries."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu.backend import cpu_backend
from metainfer.kernels.cpu.norm import normed
from metainfer.kernels.cpu.rope import angles, turn
from metainfer.kernels.cpu.tiles import row_tiles
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.ops.compress import CompressCase


def compress(
    case: CompressCase,
    rows_NW: torch.Tensor,
    first_window: int,
    norm_weight_D: torch.Tensor,
    rotation_ER2: torch.Tensor,
) -> torch.Tensor:
    entries_ED = torch.empty(len(rotation_ER2), case.width, dtype=TORCH_DTYPES[case.dtype])
    windows_ERW = rows_NW.unflatten(0, (len(rows_NW) // case.ratio, case.ratio))
    own_ERW = windows_ERW[1:] if case.overlap else windows_ERW
    angle_E1R = angles(rotation_ER2)
    for tile in row_tiles(len(entries_ED), case.span * case.row_width):
        value_ESD, score_ESD = _halves(case, windows_ERW[tile], own_ERW[tile])
        if case.overlap and first_window + tile.start == 0:
            value_ESD[0, : case.ratio] = 0.0
            score_ESD[0, : case.ratio] = -torch.inf
        entries_ED[tile] = _entries(case, value_ESD, score_ESD, norm_weight_D, angle_E1R[tile])
    return entries_ED


def compress_decode(
    case: CompressCase,
    ring_NW: torch.Tensor,
    ring_rows_CS: torch.Tensor,
    norm_weight_D: torch.Tensor,
    rotation_CR2: torch.Tensor,
) -> torch.Tensor:
    rows = ring_NW.index_select(0, ring_rows_CS.flatten().clamp(min=0))
    rows_CSW = rows.unflatten(0, ring_rows_CS.shape)
    before_CRW, own_CRW = rows_CSW[:, : case.ratio], rows_CSW[:, -case.ratio :]
    value_CSD, score_CSD = _halves(case, before_CRW, own_CRW)
    missing_CS1 = (ring_rows_CS < 0).unsqueeze(2)
    value_CSD = value_CSD.masked_fill(missing_CS1, 0.0)
    # As good as -inf beside other scores, and no NaN where all are missing.
    score_CSD = score_CSD.masked_fill(missing_CS1, torch.finfo(torch.float32).min)
    entries_CD = _entries(case, value_CSD, score_CSD, norm_weight_D, angles(rotation_CR2))
    return entries_CD.to(TORCH_DTYPES[case.dtype])


def compress_step(
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
    ring_NW.index_copy_(0, ring_rows_T, state_TW + bias_RW.index_select(0, phase_T))
    entries_TD = state_TW.new_zeros(len(state_TW), case.width, dtype=TORCH_DTYPES[case.dtype])
    closing_C = (closing_TS[:, -1] >= 0).nonzero().squeeze(1)
    if len(closing_C):
        entries_CD = compress_decode(
            case, ring_NW, closing_TS[closing_C], norm_weight_D, rotation_TR2[closing_C]
        )
        entries_TD[closing_C] = entries_CD
        if cache_MD is not None:
            cache_MD.index_copy_(0, target_rows_T[closing_C], entries_CD.to(cache_MD.dtype))
    return entries_TD


def _halves(
    case: CompressCase, before_ERW: torch.Tensor, own_ERW: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scores [E, span, D] of the tokens that each entry mixes: where windows overlap
    the halves A of the window before and B of its own, else all of its own."""
    if not case.overlap:
        value_ESD, score_ESD = own_ERW.chunk(2, dim=-1)
        return value_ESD, score_ESD
    a_value, _, a_score, _ = before_ERW.chunk(4, dim=-1)
    _, b_value, _, b_score = own_ERW.chunk(4, dim=-1)
    return torch.cat([a_value, b_value], dim=1), torch.cat([a_score, b_score], dim=1)


def _entries(
    case: CompressCase,
    value_ESD: torch.Tensor,
    score_ESD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    angle_E1R: torch.Tensor,
) -> torch.Tensor:
    """fp32 [E, D], normed and rotated."""
    pooled_ED = score_ESD.softmax(1).mul_(value_ESD).sum(1)
    normed_ED = normed(pooled_ED, case.eps, norm_weight_D)
    turn(normed_ED.unsqueeze(1), angle_E1R)
    return normed_ED


BACKENDS = (
    cpu_backend("attention.compress", compress),
    cpu_backend("attention.compress_decode", compress_decode),
    cpu_backend("attention.compress_step", compress_step),
)
