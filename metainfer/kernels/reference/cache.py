"""Rows on their way into caches, plainly."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.formats import (
    decode_rows,
    encode_index,
    encode_rows,
    hadamard,
)
from metainfer.kernels.reference.norm import layer_normed, rms
from metainfer.kernels.reference.rotation import rotated
from metainfer.kernels.registry import Backend
from metainfer.ops.cache import DENSE, CacheReadCase, CacheWriteCase
from metainfer.ops.index_codes import IndexEncodeCase, IndexWriteCase
from metainfer.ops.kernel_order import REFERENCE


def write(
    case: CacheWriteCase,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rotation_TR2: torch.Tensor | None,
    cache: torch.Tensor,
    rows_T: torch.Tensor,
) -> torch.Tensor:
    if weight_D is not None:
        normed, others = x_TD.tensor_split([case.normed], dim=-1)
        normed = (rms(normed, case.eps) * weight_D).to(x_TD.dtype)
        x_TD = torch.cat([normed, others], dim=-1)
    x_TD = _rotated(x_TD.unsqueeze(1), rotation_TR2, True, False).squeeze(1)
    kept = x_TD.to(cache.dtype) if case.format == DENSE else encode_rows(case.format, x_TD)
    cache[rows_T[rows_T >= 0]] = kept[rows_T >= 0]
    return (kept if case.format == DENSE else decode_rows(case.format, kept)).to(x_TD.dtype)


def read(case: CacheReadCase, cache: torch.Tensor, rows_T: torch.Tensor) -> torch.Tensor:
    return decode_rows(case.format, cache[rows_T]).to(TORCH_DTYPES[case.dtype])


def write_index(
    case: IndexWriteCase,
    x_TI: torch.Tensor,
    weight_I: torch.Tensor | None,
    bias_I: torch.Tensor | None,
    rotation_TR2: torch.Tensor | None,
    codes_MC: torch.Tensor,
    scales_MS: torch.Tensor,
    rows_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = x_TI.dtype
    if case.norm == "layer":
        x_TI = layer_normed(x_TI, weight_I, bias_I, case.eps).to(dtype)
    elif case.norm == "rms":
        x_TI = (rms(x_TI, case.eps) * weight_I).to(dtype)
    codes, scales = _encoded(case, x_TI.unsqueeze(1), rotation_TR2)
    listed_T = rows_T >= 0
    codes_MC[rows_T[listed_T]] = codes.squeeze(1)[listed_T]
    scales_MS[rows_T[listed_T]] = scales.squeeze(1)[listed_T]
    return codes_MC, scales_MS


def encode_queries(
    case: IndexEncodeCase, q_THI: torch.Tensor, rotation_TR2: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _encoded(case, q_THI, rotation_TR2)


def _encoded(
    case: IndexWriteCase | IndexEncodeCase, x_THI: torch.Tensor, rotation_TR2: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    x_THI = _rotated(x_THI, rotation_TR2, case.interleaved, case.leading)
    return encode_index(case.format, hadamard(x_THI) if case.hadamard else x_THI)


def _rotated(x_THD: torch.Tensor, rotation_TR2: torch.Tensor | None, *places: Any) -> torch.Tensor:
    """x rotated and rounded, if there are angles."""
    if rotation_TR2 is None:
        return x_THD
    return rotated(x_THD, rotation_TR2, False, *places).to(x_THD.dtype)


BACKENDS = (
    Backend("cache.write", REFERENCE, write),
    Backend("cache.read", REFERENCE, read),
    Backend("cache.write_index", REFERENCE, write_index),
    Backend("index.encode_queries", REFERENCE, encode_queries),
)
