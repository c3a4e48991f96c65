"""attention.sparse_prefill on sm_90 with its own matrix instructions (sparse_prefill.cu)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from metainfer.kernels.gpu.program import CudaKernel, compiler
from metainfer.kernels.registry import YES, Verdict, no
from metainfer.kernels.triton import attention_prefill
from metainfer.kernels.triton.backend import Declared
from metainfer.kernels.triton.launch import Launcher
from metainfer.kernels.triton.prefill_entries import readable
from metainfer.ops.attention import DENSE, AttentionCase
from metainfer.ops.base import Target

KERNEL = CudaKernel("sparse_prefill", threads=384, folder=Path(__file__).parent)
CAPABILITY = (9, 0)

_HEADS = 64  # rows of a warpgroup's product
_VALUE = 512
_TILE = 64
_COPY_BYTES = 16
_LOG2E = 1.4426950408889634
# By format of the entries, and of dense ones by their type: FORMAT in the source.
_FORMATS: Mapping[str, int] = MappingProxyType({"v4_fp8": 2, "v41_fp4": 3, "mla_fp8": 4})
_DENSE: Mapping[torch.dtype, int] = MappingProxyType({torch.bfloat16: 0, torch.float32: 1})


def eligible(case: AttentionCase, target: Target) -> Verdict:
    """Cases of whole groups of 64 heads over values of 512 channels, in bf16."""
    if target.type != "cuda" or target.capability != CAPABILITY:
        return no("is written with instructions that sm_90 alone has")
    if case.dtype != "bfloat16":
        return no(f"multiplies in bfloat16, not in {case.dtype}")
    if case.heads % _HEADS:
        return no(f"takes heads by {_HEADS}, and {case.heads} is no multiple of that")
    if (case.width, case.rope_extra) not in ((_VALUE, 0), (_VALUE, 64)):
        return no(f"takes keys of 512 or 512 + 64 channels, not {case.width} + {case.rope_extra}")
    if case.window % _TILE:
        return no(f"takes windows by {_TILE}, and {case.window} is no multiple of that")
    library = compiler()
    return no(library) if isinstance(library, str) else YES


def shared_bytes(case: AttentionCase) -> int:
    """Queries, two tiles of keys, two of weights, numbers and barriers: PLACE_* in the source."""
    tile = _TILE * (_VALUE + case.rope_extra) * 2
    return _HEADS * _VALUE * 2 + 2 * tile + 2 * 8192 + 4 * 384 + 4 * 8


def sparse_prefill(
    launch: Launcher,
    case: AttentionCase,
    q_THK: torch.Tensor,
    positions_T: torch.Tensor,
    latents_ND: torch.Tensor | None,
    latent_rows_T: torch.Tensor | None,
    sink_H: torch.Tensor | None,
    entries: torch.Tensor | None,
    entry_rows_BE: torch.Tensor | None,
    sequence_T: torch.Tensor | None,
    selected_TK: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if not all(_lies_dense(keys) for keys in (latents_ND, entries)):
        return attention_prefill.run(
            launch, case, q_THK, positions_T, latents_ND, latent_rows_T, sink_H, entries,
            entry_rows_BE, sequence_T, selected_TK,
        )  # fmt: skip
    rows, device = len(q_THK), q_THK.device
    out_THD = torch.empty(rows, case.heads, case.width, dtype=torch.bfloat16, device=device)
    lse_TH = torch.empty(rows, case.heads, device=device) if case.lse else None
    read = readable(launch, case, positions_T, entries, entry_rows_BE, sequence_T)
    entry_format = 0
    if read.rows is not None:
        dense = read.coded == DENSE
        entry_format = _DENSE[read.rows.dtype] if dense else _FORMATS[read.coded]
    head_blocks = case.heads // _HEADS
    launch.cuda(
        KERNEL,
        (min(rows * head_blocks, launch.multiprocessors), 1, 1),
        q_THK.contiguous(),
        positions_T,
        latents_ND,
        latent_rows_T,
        sink_H,
        read.rows,
        None if read.table is None else read.table.contiguous(),
        sequence_T,
        None if selected_TK is None else selected_TK.contiguous(),
        out_THD,
        lse_TH,
        rows,
        head_blocks,
        read.columns,
        selected_TK.shape[1] if selected_TK is not None else 0,
        case.ratio if read.rows is not None else 0,
        case.score_scale * _LOG2E,
        shared_bytes=shared_bytes(case),
        ROPE_EXTRA=case.rope_extra,
        FORMAT=entry_format,
        WINDOW=case.window if latents_ND is not None else 0,
        SELECTS=int(selected_TK is not None),
    )
    return out_THD if lse_TH is None else (out_THD, lse_TH)


def _lies_dense(keys: torch.Tensor | None) -> bool:
    """Whether rows lie one behind the other where copies of 16 bytes begin; else Triton's kernel,
    which knows strides, does the call."""
    return keys is None or (
        keys.is_contiguous() and (keys.is_meta or keys.data_ptr() % _COPY_BYTES == 0)
    )


BACKENDS = (Declared("attention.sparse_prefill", sparse_prefill, eligible, name="cuda"),)
