"""The lightning indexer, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.registry import Backend
from metainfer.ops.index import IndexCase
from metainfer.ops.kernel_order import REFERENCE


def index_topk(
    case: IndexCase,
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_MI: torch.Tensor,
    key_rows_E: torch.Tensor,
    start: int,
) -> torch.Tensor:
    positions_T = torch.arange(start, start + len(q_THI), device=q_THI.device)
    seen_T = ((positions_T + 1) // case.ratio).clamp(max=len(key_rows_E))
    entry_E = torch.arange(len(key_rows_E), device=q_THI.device)
    products_THE = torch.einsum("thi,ei->the", q_THI.float(), keys_MI[key_rows_E].float())
    return _choose(case, products_THE, weights_TH, entry_E < seen_T.unsqueeze(1))


def index_topk_decode(
    case: IndexCase,
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_MI: torch.Tensor,
    key_rows_TE: torch.Tensor,
) -> torch.Tensor:
    keys_TEI = keys_MI[key_rows_TE.clamp(min=0)].float()
    products_THE = torch.einsum("thi,tei->the", q_THI.float(), keys_TEI)
    return _choose(case, products_THE, weights_TH, key_rows_TE >= 0)


def _choose(
    case: IndexCase, products_THE: torch.Tensor, weights_TH: torch.Tensor, seen_TE: torch.Tensor
) -> torch.Tensor:
    scale = (case.width * case.heads) ** -0.5
    scores_TE = torch.einsum("th,the->te", weights_TH.float() * scale, products_THE.relu())
    worst = torch.finfo(torch.float32).min
    scores_TE = scores_TE.nan_to_num(nan=worst).clamp(min=worst)
    scores_TE = scores_TE.masked_fill(~seen_TE, -torch.inf)
    # A stable sort keeps the lower number first among equals.
    ranked_TE = scores_TE.argsort(dim=-1, descending=True, stable=True)
    ids_TK = ranked_TE[:, : case.topk]
    none = seen_TE.shape[1]
    ids_TK = torch.where(seen_TE.gather(1, ids_TK), ids_TK, none).sort(-1).values
    ids_TK = ids_TK.masked_fill(ids_TK == none, -1)
    missing = case.topk - ids_TK.shape[1]
    return torch.nn.functional.pad(ids_TK, (0, missing), value=-1)


BACKENDS = (
    Backend("attention.index_topk", REFERENCE, index_topk),
    Backend("attention.index_topk_decode", REFERENCE, index_topk_decode),
)
