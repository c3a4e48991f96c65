"""Attention of few decode rows: keys are gathered once for all heads of a row."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu import attention as torch_attention
from metainfer.kernels.native.backend import FEW_ROWS, MOST_ELEMENTS, Native, is_bf16, require
from metainfer.kernels.native.library import Library
from metainfer.kernels.registry import Backend, Verdict, no
from metainfer.ops.attention import DENSE, AttentionCase
from metainfer.ops.base import Target
from metainfer.ops.formats import V4_FP8

_CODED_ROWS = 2  # V4_FP8 of the C code


def sparse_decode(
    library: Library,
    case: AttentionCase,
    q_THD: torch.Tensor,
    ring_ND: torch.Tensor,
    window_rows_TW: torch.Tensor,
    sink_H: torch.Tensor,
    entries_MD: torch.Tensor | None = None,
    entry_rows_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    if entries_MD is None or entry_rows_TK is None:
        entries_MD, entry_rows_TK = ring_ND, window_rows_TW[:, :0]
    keys = window_rows_TW.shape[1] + entry_rows_TK.shape[1]
    if len(q_THD) > FEW_ROWS or case.heads * keys * case.width > MOST_ELEMENTS:
        entries = (entries_MD, entry_rows_TK) if entry_rows_TK.shape[1] else ()
        return torch_attention.sparse_decode(case, q_THD, ring_ND, window_rows_TW, sink_H, *entries)
    window_rows_TW, entry_rows_TK = window_rows_TW.contiguous(), entry_rows_TK.contiguous()
    out_THD = torch.empty_like(q_THD)
    require(
        library.sparse_decode(
            len(q_THD),
            case.heads,
            case.width,
            q_THD.data_ptr(),
            is_bf16(q_THD),
            ring_ND.data_ptr(),
            _form(ring_ND),
            window_rows_TW.data_ptr(),
            window_rows_TW.shape[1],
            entries_MD.data_ptr(),
            _form(entries_MD),
            entry_rows_TK.data_ptr(),
            entry_rows_TK.shape[1],
            sink_H.data_ptr(),
            out_THD.data_ptr(),
        )
    )
    return out_THD


def _form(cache: torch.Tensor) -> int:
    """How the C code calls the form of rows."""
    return _CODED_ROWS if cache.dtype is torch.uint8 else is_bf16(cache)


def _eligible(case: AttentionCase, target: Target) -> Verdict:
    others = {case.window_format, case.entry_format} - {DENSE, V4_FP8.name}
    if others:
        return no(f"reads caches that are dense or {V4_FP8.name}, not {', '.join(sorted(others))}")
    if case.scale is not None:
        return no(f"scales by width^-0.5 alone, not by {case.scale:.4g}")
    return torch_attention.as_on_cpu(case, target)


def backends(native: Native) -> tuple[Backend, ...]:
    return (native.backend("attention.sparse_decode", sparse_decode, eligible=_eligible),)
