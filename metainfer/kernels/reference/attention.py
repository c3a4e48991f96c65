"""Attention over window and entries, plainly: all keys side by side under a mask."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.registry import Backend
from metainfer.ops.attention import AttentionCase
from metainfer.ops.kernel_order import REFERENCE


def sparse_prefill(
    case: AttentionCase,
    q_THD: torch.Tensor,
    latents_ND: torch.Tensor,
    start: int,
    sink_H: torch.Tensor,
    entries_MD: torch.Tensor | None = None,
    entry_rows_E: torch.Tensor | None = None,
    selected_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    device, rows = q_THD.device, len(q_THD)
    position_T1 = torch.arange(start, start + rows, device=device).unsqueeze(1)
    first = start + rows - len(latents_ND)
    latent_N = torch.arange(first, start + rows, device=device)
    seen_TN = (latent_N <= position_T1) & (latent_N > position_T1 - case.window)
    keys_ND = latents_ND.float()
    if entries_MD is not None and entry_rows_E is not None:
        entry_E = torch.arange(len(entry_rows_E), device=device)
        seen_TE = entry_E < (position_T1 + 1) // case.ratio
        if selected_TK is not None:
            # One column more takes the -1 of rows with fewer entries.
            chosen = torch.zeros(rows, len(entry_E) + 1, dtype=torch.bool, device=device)
            seen_TE = seen_TE & chosen.scatter_(1, selected_TK % chosen.shape[1], True)[:, :-1]
        seen_TN = torch.cat([seen_TN, seen_TE], dim=1)
        keys_ND = torch.cat([keys_ND, entries_MD[entry_rows_E].float()])
    keys_TND = keys_ND.expand(rows, -1, -1)
    return _attend(case, q_THD, keys_TND, seen_TN, sink_H)


def sparse_decode(
    case: AttentionCase,
    q_THD: torch.Tensor,
    ring_ND: torch.Tensor,
    window_rows_TW: torch.Tensor,
    sink_H: torch.Tensor,
    entries_MD: torch.Tensor | None = None,
    entry_rows_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    keys_TND, seen_TN = _listed(ring_ND, window_rows_TW)
    if entries_MD is not None and entry_rows_TK is not None:
        entries_TKD, seen_TK = _listed(entries_MD, entry_rows_TK)
        keys_TND = torch.cat([keys_TND, entries_TKD], dim=1)
        seen_TN = torch.cat([seen_TN, seen_TK], dim=1)
    return _attend(case, q_THD, keys_TND, seen_TN, sink_H)


def _listed(cache_ND: torch.Tensor, rows_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The listed rows in fp32, zero where the list says -1, and where it does not."""
    listed_TK = rows_TK >= 0
    keys_TKD = cache_ND[rows_TK.clamp(min=0)].float()
    return keys_TKD.masked_fill(~listed_TK.unsqueeze(-1), 0.0), listed_TK


def _attend(
    case: AttentionCase,
    q_THD: torch.Tensor,
    keys_TND: torch.Tensor,
    seen_TN: torch.Tensor,
    sink_H: torch.Tensor,
) -> torch.Tensor:
    scores_THN = torch.einsum("thd,tnd->thn", q_THD.float(), keys_TND) * case.width**-0.5
    scores_THN = scores_THN.masked_fill(~seen_TN.unsqueeze(1), -torch.inf)
    sink_TH1 = sink_H.float().expand(len(q_THD), -1).unsqueeze(-1)
    weights_THN = torch.cat([scores_THN, sink_TH1], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("thn,tnd->thd", weights_THN, keys_TND).to(TORCH_DTYPES[case.dtype])


BACKENDS = (
    Backend("attention.sparse_prefill", REFERENCE, sparse_prefill),
    Backend("attention.sparse_decode", REFERENCE, sparse_decode),
)
