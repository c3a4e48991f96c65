"""Attention over window and entries, plainly: each row's keys side by side, in fp32."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.dtypes import TORCH_DTYPES
from metainfer.kernels.reference.formats import decode_rows
from metainfer.kernels.registry import Backend
from metainfer.ops.attention import DENSE, AttentionCase, MergeCase
from metainfer.ops.kernel_order import REFERENCE

# Numbers of gathered keys that are held at a time.
_MOST_NUMBERS = 2**26

# A cache, its format, and the rows of it that each query row sees, [T, K], -1 for none.
Listed = tuple[torch.Tensor, str, torch.Tensor]


def sparse_prefill(
    case: AttentionCase,
    q_THK: torch.Tensor,
    positions_T: torch.Tensor,
    latents_ND: torch.Tensor | None,
    latent_rows_T: torch.Tensor | None,
    sink_H: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
    entry_rows_BE: torch.Tensor | None = None,
    sequence_T: torch.Tensor | None = None,
    selected_TK: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    positions_T1 = positions_T.unsqueeze(1)
    lists: list[Listed] = []
    if latents_ND is not None and latent_rows_T is not None:
        back_W = torch.arange(case.window - 1, -1, -1, device=q_THK.device)
        rows_TW = latent_rows_T.unsqueeze(1) - back_W
        lists.append((latents_ND, DENSE, rows_TW.masked_fill(back_W > positions_T1, -1)))
    if entries is not None and entry_rows_BE is not None:
        if sequence_T is None:
            sequence_T = torch.zeros_like(positions_T)
        if selected_TK is None:
            entry_E = torch.arange(entry_rows_BE.shape[1], device=q_THK.device)
            hidden_TE = entry_E >= (positions_T1 + 1) // case.ratio
            rows_TK = entry_rows_BE[sequence_T].masked_fill(hidden_TE, -1)
        else:
            none_TK = selected_TK < 0
            rows_TK = torch.full_like(selected_TK, -1)
            if entry_rows_BE.numel():
                chosen_TK = selected_TK.masked_fill(none_TK, 0)
                rows_TK = entry_rows_BE[sequence_T.unsqueeze(1), chosen_TK]
                rows_TK = rows_TK.masked_fill(none_TK, -1)
        lists.append((entries, case.entry_format, rows_TK))
    return _attend(case, q_THK, lists, sink_H)


def sparse_decode(
    case: AttentionCase,
    q_THK: torch.Tensor,
    ring: torch.Tensor | None,
    window_rows_TW: torch.Tensor | None,
    sink_H: torch.Tensor | None = None,
    entries: torch.Tensor | None = None,
    entry_rows_TK: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    lists: list[Listed] = []
    if ring is not None and window_rows_TW is not None:
        lists.append((ring, case.window_format, window_rows_TW))
    if entries is not None and entry_rows_TK is not None:
        lists.append((entries, case.entry_format, entry_rows_TK))
    return _attend(case, q_THK, lists, sink_H)


def _attend(
    case: AttentionCase, q_THK: torch.Tensor, lists: list[Listed], sink_H: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    rows, heads = q_THK.shape[:2]
    out_THD = torch.zeros(
        rows, heads, case.width, dtype=TORCH_DTYPES[case.dtype], device=q_THK.device
    )
    lse_TH = torch.full((rows, heads), -torch.inf, device=q_THK.device)
    keys = sum(rows_TK.shape[1] for _, _, rows_TK in lists)
    step = max(1, _MOST_NUMBERS // max(1, keys * case.key_width))
    for first in range(0, rows, step):
        tile = slice(first, first + step)
        gathered = [_gather(case, cache, form, rows_TK[tile]) for cache, form, rows_TK in lists]
        keys_TNK = torch.cat([keys_TKD for keys_TKD, _ in gathered], dim=1)
        seen_TN = torch.cat([seen_TK for _, seen_TK in gathered], dim=1)
        scores_THN = torch.einsum("thk,tnk->thn", q_THK[tile].float(), keys_TNK)
        scores_THN = (scores_THN * case.score_scale).masked_fill(~seen_TN.unsqueeze(1), -torch.inf)
        columns = [scores_THN]
        if sink_H is not None:
            columns.append(sink_H.float().expand(len(scores_THN), -1).unsqueeze(-1))
        scores_THN = torch.cat(columns, dim=-1)
        if not scores_THN.shape[-1]:
            continue
        lse_TH[tile] = lse_tH = scores_THN.logsumexp(-1)
        blind_tH1 = lse_tH.isneginf().unsqueeze(-1)  # nothing is seen
        weights_THN = scores_THN.softmax(-1)[..., : keys_TNK.shape[1]].masked_fill(blind_tH1, 0.0)
        values_TND = keys_TNK[..., : case.width]
        out_THD[tile] = torch.einsum("thn,tnd->thd", weights_THN, values_TND).to(out_THD.dtype)
    return (out_THD, lse_TH) if case.lse else out_THD


def _gather(
    case: AttentionCase, cache: torch.Tensor, row_format: str, rows_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The listed rows in fp32, zero where the list says -1, and where it does not."""
    listed_TK = rows_TK >= 0
    rows_N = rows_TK.clamp(min=0).flatten()
    if not len(cache):
        return torch.zeros(*rows_TK.shape, case.key_width, device=cache.device), listed_TK
    keys_NK = cache.index_select(0, rows_N)
    keys_NK = keys_NK.float() if row_format == DENSE else decode_rows(row_format, keys_NK)
    keys_TKK = keys_NK.view(*rows_TK.shape, case.key_width)
    return keys_TKK.masked_fill(~listed_TK.unsqueeze(-1), 0.0), listed_TK


def merge(
    case: MergeCase, out_STHD: torch.Tensor, lse_STH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse_TH = lse_STH.logsumexp(0)
    weights_STH = (lse_STH - lse_TH).exp().masked_fill(lse_STH.isneginf(), 0.0)
    out_THD = (weights_STH.unsqueeze(-1) * out_STHD.float()).sum(0)
    return out_THD.to(TORCH_DTYPES[case.dtype]), lse_TH


BACKENDS = (
    Backend("attention.sparse_prefill", REFERENCE, sparse_prefill),
    Backend("attention.sparse_decode", REFERENCE, sparse_decode),
    Backend("attention.merge", REFERENCE, merge),
)
