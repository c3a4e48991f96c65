"""Compressors, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.norm import rms
from metainfer.kernels.reference.rotation import rotated
from metainfer.kernels.registry import Backend
from metainfer.ops.compress import CompressCase
from metainfer.ops.kernel_order import REFERENCE


def compress(
    case: CompressCase,
    rows_NW: torch.Tensor,
    first_window: int,
    norm_weight_D: torch.Tensor,
    rotation_ER2: torch.Tensor,
) -> torch.Tensor:
    # [E, span, W]: the rows of each entry's windows.
    rows_ESW = rows_NW.unfold(0, case.span, case.ratio).transpose(1, 2)
    exists_ES = torch.ones(rows_ESW.shape[:2], dtype=torch.bool, device=rows_NW.device)
    if case.overlap and first_window == 0:
        exists_ES[:1, : case.ratio] = False
    return _entries(case, rows_ESW, exists_ES, norm_weight_D, rotation_ER2)


def compress_decode(
    case: CompressCase,
    ring_NW: torch.Tensor,
    ring_rows_CS: torch.Tensor,
    norm_weight_D: torch.Tensor,
    rotation_CR2: torch.Tensor,
) -> torch.Tensor:
    rows_CSW = ring_NW[ring_rows_CS.clamp(min=0)]
    return _entries(case, rows_CSW, ring_rows_CS >= 0, norm_weight_D, rotation_CR2)


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
    entries_TD = compress_decode(case, ring_NW, closing_TS, norm_weight_D, rotation_TR2)
    if cache_MD is not None:
        closes_T = target_rows_T >= 0
        cache_MD[target_rows_T[closes_T]] = entries_TD[closes_T].to(cache_MD.dtype)
    return entries_TD


def _entries(
    case: CompressCase,
    rows_ESW: torch.Tensor,
    exists_ES: torch.Tensor,
    norm_weight_D: torch.Tensor,
    rotation_ER2: torch.Tensor,
) -> torch.Tensor:
    value, score = rows_ESW.chunk(2, dim=-1)
    if case.overlap:
        value, score = _halves(value, case.ratio), _halves(score, case.ratio)
    missing = ~exists_ES.unsqueeze(-1)
    weight = score.masked_fill(missing, -torch.inf).softmax(dim=1).masked_fill(missing, 0.0)
    pooled_ED = (weight * value.masked_fill(missing, 0.0)).sum(1)
    dtype = TORCH_DTYPES[case.dtype]
    normed_ED = (rms(pooled_ED.to(dtype), case.eps) * norm_weight_D).to(dtype)
    return rotated(normed_ED.unsqueeze(1), rotation_ER2, inverse=False).squeeze(1).to(dtype)


def _halves(both: torch.Tensor, ratio: int) -> torch.Tensor:
    """[E, 2 ratio, 2 D] -> [E, 2 ratio, D]: A of the previous window, B of this one."""
    a, b = both.chunk(2, dim=-1)
    return torch.cat([a[:, :ratio], b[:, ratio:]], dim=1)


BACKENDS = (
    Backend("attention.compress", REFERENCE, compress),
    Backend("attention.compress_decode", REFERENCE, compress_decode),
    Backend("attention.compress_step", REFERENCE, compress_step),
)
