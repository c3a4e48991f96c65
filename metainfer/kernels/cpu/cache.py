"""Rows on their way into caches and back, in tiles of rows."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu.backend import cpu_backend, on_cpu
from metainfer.kernels.cpu.coded import row_numbers
from metainfer.kernels.cpu.norm import normed
from metainfer.kernels.cpu.rope import angles, turn
from metainfer.kernels.cpu.tiles import row_tiles
from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.formats import encode_index, encode_rows, hadamard
from metainfer.kernels.registry import Verdict, no
from metainfer.ops.base import Target
from metainfer.ops.cache import DENSE, CacheReadCase, CacheWriteCase
from metainfer.ops.index_codes import IndexEncodeCase, IndexWriteCase


def write(
    case: CacheWriteCase,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rotation_TR2: torch.Tensor | None,
    cache: torch.Tensor,
    rows_T: torch.Tensor,
) -> torch.Tensor:
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    for tile in row_tiles(*x_TD.shape):
        x_tD = x_TD[tile]
        if weight_D is not None:
            x_tD = x_tD.clone()
            x_tD[:, : case.normed] = normed(x_tD[:, : case.normed], case.eps, weight_D)
        if rotation_TR2 is not None:
            x_tD = _turned(x_tD.unsqueeze(1), rotation_TR2[tile]).squeeze(1)
        if case.format == DENSE:
            kept = y_TD[tile] = x_tD.to(cache.dtype)
        else:
            kept = encode_rows(case.format, x_tD)
            y_TD[tile] = row_numbers(case.format, kept)
        _put(cache, rows_T[tile], kept)
    return y_TD


def read(case: CacheReadCase, cache: torch.Tensor, rows_T: torch.Tensor) -> torch.Tensor:
    return row_numbers(case.format, cache.index_select(0, rows_T), TORCH_DTYPES[case.dtype])


def write_index(
    case: IndexWriteCase,
    x_TI: torch.Tensor,
    weight_I: None,
    bias_I: None,
    rotation_TR2: torch.Tensor | None,
    codes_MC: torch.Tensor,
    scales_MS: torch.Tensor,
    rows_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    for tile in row_tiles(*x_TI.shape):
        angle_TR2 = None if rotation_TR2 is None else rotation_TR2[tile]
        codes, scales = _encoded(case, x_TI[tile].unsqueeze(1), angle_TR2)
        _put(codes_MC, rows_T[tile], codes.squeeze(1))
        _put(scales_MS, rows_T[tile], scales.squeeze(1))
    return codes_MC, scales_MS


def encode_queries(
    case: IndexEncodeCase, q_THI: torch.Tensor, rotation_TR2: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [
        _encoded(case, q_THI[tile], None if rotation_TR2 is None else rotation_TR2[tile])
        for tile in row_tiles(len(q_THI), case.heads * case.width)
    ]
    if not parts:
        return _encoded(case, q_THI, None)
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _encoded(
    case: IndexWriteCase | IndexEncodeCase, x_THI: torch.Tensor, rotation_TR2: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if rotation_TR2 is not None:
        x_THI = _turned(x_THI, rotation_TR2)
    return encode_index(case.format, hadamard(x_THI) if case.hadamard else x_THI)


def _turned(x_THD: torch.Tensor, rotation_TR2: torch.Tensor) -> torch.Tensor:
    """A copy, rotated and rounded."""
    y_THD = x_THD.contiguous().clone()
    turn(y_THD, angles(rotation_TR2))
    return y_THD


def _put(cache: torch.Tensor, rows_T: torch.Tensor, kept: torch.Tensor) -> None:
    """Writes the rows that have a place."""
    listed_T = rows_T >= 0
    if bool(listed_T.all()):
        cache.index_copy_(0, rows_T, kept)
    else:
        cache.index_copy_(0, rows_T[listed_T], kept[listed_T])


def _plain_rope(case: IndexWriteCase | IndexEncodeCase, target: Target) -> Verdict:
    """What the models that run on the CPU need."""
    if isinstance(case, IndexWriteCase) and case.norm:
        return no(f"norms no index keys, and the case has the norm {case.norm}")
    if case.rope_width and (case.leading or not case.interleaved):
        return no("rotates interleaved pairs of the last channels alone")
    return on_cpu(case, target)


BACKENDS = (
    cpu_backend("cache.write", write),
    cpu_backend("cache.read", read),
    cpu_backend("cache.write_index", write_index, eligible=_plain_rope),
    cpu_backend("index.encode_queries", encode_queries, eligible=_plain_rope),
)
