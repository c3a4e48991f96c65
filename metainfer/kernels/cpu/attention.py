"""Attention over window and entries in tiles of rows.

A tile multiplies its queries with the latents of its own windows and with the entries. Where rows
choose few of many entries, each row's entries are gathered; else the tile takes all that its rows
see, and a mask keeps those that each row chose.

Scores are fp32 products of fp32 numbers: in bf16 large scores would lose what softmax looks at.
Each head's sink is one more column of the scores, without a key.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from metainfer.kernels.cpu.backend import cpu_backend, on_cpu
from metainfer.kernels.cpu.coded import row_numbers
from metainfer.kernels.cpu.tiles import is_one_tile, row_tiles
from metainfer.kernels.registry import Verdict, no
from metainfer.ops.attention import DENSE, AttentionCase
from metainfer.ops.base import Target

# Caches, each with the rows of it that each query row sees, and its format: [N, D], or bytes of
# rows, and [T, K].
Lists = list[tuple[torch.Tensor, torch.Tensor, str]]

# Scores (rows x heads x keys) that a tile holds, and the most rows of one.
_TILE_SCORES = 2**19
_TILE_ROWS = 64


def sparse_prefill(
    case: AttentionCase,
    q_THD: torch.Tensor,
    positions_T: torch.Tensor,
    latents_ND: torch.Tensor,
    latent_rows_T: torch.Tensor,
    sink_H: torch.Tensor,
    entries_MD: torch.Tensor | None = None,
    entry_rows_BE: torch.Tensor | None = None,
    sequence_T: torch.Tensor | None = None,
    selected_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    out_THD = torch.empty_like(q_THD)
    for run in _runs(positions_T, latent_rows_T, sequence_T):
        start, row = int(positions_T[run.start]), int(latent_rows_T[run.start])
        halo = min(start, case.window - 1)
        entry_rows_E = None
        if entry_rows_BE is not None:
            entry_rows_E = entry_rows_BE[0 if sequence_T is None else int(sequence_T[run.start])]
            entry_rows_E = entry_rows_E[: (start + run.stop - run.start) // case.ratio]
        _prefill_run(
            case,
            out_THD[run],
            q_THD[run],
            latents_ND[row - halo : row + run.stop - run.start],
            start,
            sink_H,
            entries_MD,
            entry_rows_E,
            None if selected_TK is None else selected_TK[run],
        )
    return out_THD


def _runs(
    positions_T: torch.Tensor, latent_rows_T: torch.Tensor, sequence_T: torch.Tensor | None
) -> list[slice]:
    """Rows that follow each other in one sequence, as long as they do."""
    if not len(positions_T):
        return []
    broken_T = (positions_T.diff() != 1) | (latent_rows_T.diff() != 1)
    if sequence_T is not None:
        broken_T |= sequence_T.diff() != 0
    edges = [0, *(broken_T.nonzero().flatten() + 1).tolist(), len(positions_T)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _prefill_run(
    case: AttentionCase,
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    latents_ND: torch.Tensor,
    start: int,
    sink_H: torch.Tensor,
    entries_MD: torch.Tensor | None,
    entry_rows_E: torch.Tensor | None,
    selected_TK: torch.Tensor | None,
) -> None:
    """Attention of consecutive rows of one sequence from the position `start` on, into out_THD;
    latents_ND ends with theirs and starts with the visible ones before them."""
    rows, halo = len(q_THD), len(latents_ND) - len(q_THD)
    entries_ED = latents_ND[:0]
    if entries_MD is not None and entry_rows_E is not None:
        entries_ED = entries_MD.index_select(0, entry_rows_E)
        entries_ED = _numbers(entries_ED, case.entry_format, q_THD.dtype)
    gathers, keys = False, len(entries_ED)
    if selected_TK is not None and _gather_is_cheaper(case, selected_TK.shape[1], keys):
        gathers, keys = True, selected_TK.shape[1]
    step = max(1, min(_TILE_ROWS, _TILE_SCORES // (case.heads * (keys + case.window))))
    for tile in row_tiles(rows, 1, step):
        first = max(0, halo + tile.start - case.window + 1)
        window_ND = latents_ND[first : halo + tile.stop]
        window_mask_tN = _window_mask(case, tile, halo - first, len(window_ND))
        q_tHD = q_THD[tile].float() * case.score_scale
        chosen_tK = None if selected_TK is None else selected_TK[tile]
        if gathers and chosen_tK is not None:
            out_THD[tile] = _attend_gathered(
                q_tHD, window_ND, window_mask_tN, sink_H, entries_ED, chosen_tK
            )
            continue
        seen_t = (torch.arange(tile.start, tile.stop) + (start + 1)) // max(1, case.ratio)
        seen_ED = entries_ED[: int(seen_t[-1])]
        mask_tN = torch.cat([window_mask_tN, _entry_mask(len(seen_ED), seen_t, chosen_tK)], dim=1)
        out_THD[tile] = _attend(q_tHD, torch.cat([window_ND, seen_ED]), mask_tN, sink_H)


def _gather_is_cheaper(case: AttentionCase, chosen: int, entries: int) -> bool:
    """As measured: gathering an entry for one row costs as much as the products of some heads."""
    return entries * case.heads > chosen * (case.heads + 12)


def _window_mask(case: AttentionCase, tile: slice, offset: int, keys: int) -> torch.Tensor:
    """fp32 [t, N], 0 where a row of the tile sees a latent and -inf elsewhere; `offset`: place of
    row 0 of the call among the latents."""
    age_tN = torch.arange(tile.start, tile.stop).unsqueeze(1) - (torch.arange(keys) - offset)
    hidden_tN = (age_tN < 0).logical_or_(age_tN >= case.window)
    return torch.zeros(hidden_tN.shape).masked_fill_(hidden_tN, -torch.inf)


def _entry_mask(
    entries: int, seen_T: torch.Tensor, selected_TK: torch.Tensor | None
) -> torch.Tensor:
    """The same for the first `entries` entries: those that a row sees, or of these the selected."""
    if selected_TK is None:
        hidden_TE = torch.arange(entries) >= seen_T.unsqueeze(1)
        return torch.zeros(hidden_TE.shape).masked_fill_(hidden_TE, -torch.inf)
    # One column more takes the -1 of rows with fewer entries.
    mask_TE = torch.full((len(seen_T), entries + 1), -torch.inf)
    none_TK = selected_TK.masked_fill(selected_TK < 0, entries)
    return mask_TE.scatter_(1, none_TK, 0.0)[:, :entries]


def _attend(
    q_THD: torch.Tensor,
    keys_ND: torch.Tensor,
    mask_TN: torch.Tensor,
    sink_H: torch.Tensor,
) -> torch.Tensor:
    """Rows with the same keys under a mask; q scaled, in fp32."""
    rows, heads = q_THD.shape[:2]
    scores_THN = _with_sinks(rows, heads, len(keys_ND), sink_H)
    scores_RN = scores_THN.flatten(0, 1)[:, :-1]
    torch.mm(q_THD.flatten(0, 1), keys_ND.float().T, out=scores_RN)
    scores_THN[..., :-1].add_(mask_TN.unsqueeze(1))
    weights_RN = _softmax(scores_THN).flatten(0, 1)[:, :-1].to(keys_ND.dtype)
    return (weights_RN @ keys_ND).unflatten(0, (rows, heads))


def _attend_gathered(
    q_THD: torch.Tensor,
    window_ND: torch.Tensor,
    mask_TN: torch.Tensor,
    sink_H: torch.Tensor,
    entries_ED: torch.Tensor,
    selected_TK: torch.Tensor,
) -> torch.Tensor:
    """Rows with the same window under a mask, and entries of their own."""
    rows, heads = q_THD.shape[:2]
    window, dtype = len(window_ND), entries_ED.dtype
    scores_THN = _with_sinks(rows, heads, window + selected_TK.shape[1], sink_H)
    scores_RN = scores_THN.flatten(0, 1)
    torch.mm(q_THD.flatten(0, 1), window_ND.float().T, out=scores_RN[:, :window])
    scores_THN[..., :window].add_(mask_TN.unsqueeze(1))
    entries_TKD = _rows_of(entries_ED, selected_TK.clamp(min=0))
    scores_THK = scores_THN[..., window:-1]
    scores_THK.copy_(torch.bmm(q_THD, entries_TKD.float().transpose(1, 2)))
    scores_THK.masked_fill_((selected_TK < 0).unsqueeze(1), -torch.inf)
    weights_THN = _softmax(scores_THN).to(dtype)
    out_THD = torch.bmm(weights_THN[..., window:-1], entries_TKD)
    of_window_RD = weights_THN.flatten(0, 1)[:, :window] @ window_ND
    return out_THD.add_(of_window_RD.view_as(out_THD))


def sparse_decode(
    case: AttentionCase,
    q_THD: torch.Tensor,
    ring_ND: torch.Tensor,
    window_rows_TW: torch.Tensor,
    sink_H: torch.Tensor,
    entries_MD: torch.Tensor | None = None,
    entry_rows_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    lists = [(ring_ND, window_rows_TW, case.window_format)]
    if entries_MD is not None and entry_rows_TK is not None:
        lists.append((entries_MD, entry_rows_TK, case.entry_format))
    keys = sum(rows_TK.shape[1] for _, rows_TK, _ in lists)
    if is_one_tile(len(q_THD), keys * case.width):
        return _decode(case, q_THD, lists, sink_H).to(q_THD.dtype)
    out_THD = torch.empty_like(q_THD)
    for tile in row_tiles(len(q_THD), keys * case.width):
        tile_lists = [(cache_ND, rows_TK[tile], form) for cache_ND, rows_TK, form in lists]
        out_THD[tile] = _decode(case, q_THD[tile], tile_lists, sink_H)
    return out_THD


def _decode(
    case: AttentionCase, q_THD: torch.Tensor, lists: Lists, sink_H: torch.Tensor
) -> torch.Tensor:
    """Rows with keys of their own; fp32."""
    keys_TND, seen_TN = _listed_keys(lists, case.width)
    q_THD = q_THD.float() * case.score_scale
    scores_THN = torch.bmm(q_THD, keys_TND.transpose(1, 2))
    if seen_TN is not None:
        scores_THN.masked_fill_(~seen_TN.unsqueeze(1), -torch.inf)
    sink_TH1 = sink_H.expand(len(q_THD), -1).unsqueeze(2)
    weights_THN = torch.cat([scores_THN, sink_TH1], dim=2).softmax(-1)
    return torch.bmm(weights_THN[..., :-1], keys_TND)


def _listed_keys(lists: Lists, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Listed rows [T, K, D] of each cache side by side, in fp32; where lists have a -1 also which
    of the keys are listed, bool [T, keys]. Keys that are not listed are finite."""
    rows_TN = torch.cat([rows_TK for _, rows_TK, _ in lists], dim=1) if lists[1:] else lists[0][1]
    seen_TN = None
    if rows_TN.numel() and int(rows_TN.min()) < 0:
        seen_TN = rows_TN >= 0
    if not lists[1:] and seen_TN is None:
        return _rows_of(*lists[0]).float(), None
    counts = [rows_TK.shape[1] for _, rows_TK, _ in lists]
    keys_TND = torch.empty(*rows_TN.shape, width)
    for (cache_ND, rows_TK, form), part_TKD in zip(
        lists, keys_TND.split(counts, dim=1), strict=True
    ):
        if seen_TN is None:
            part_TKD.copy_(_rows_of(cache_ND, rows_TK, form))
        elif rows_TK.numel():
            _copy_listed(part_TKD, cache_ND, rows_TK, form)
    return keys_TND, seen_TN


def _copy_listed(
    out_TKD: torch.Tensor, cache_ND: torch.Tensor, rows_TK: torch.Tensor, form: str
) -> None:
    """Another row of the same list stands in for -1, as only listed rows are sure to be finite; 0
    where there is none."""
    stand_in_T1 = rows_TK.amax(1, keepdim=True)
    chosen_TK = torch.where(rows_TK < 0, stand_in_T1, rows_TK)
    out_TKD.copy_(_rows_of(cache_ND, chosen_TK.clamp(min=0), form))
    if int(stand_in_T1.min()) < 0:
        out_TKD.masked_fill_((chosen_TK < 0).unsqueeze(2), 0.0)


def _rows_of(cache_ND: torch.Tensor, rows_TK: torch.Tensor, form: str = DENSE) -> torch.Tensor:
    """[T, K, D]: the listed rows of a cache in a format."""
    listed = cache_ND.index_select(0, rows_TK.flatten())
    if form != DENSE:
        listed = row_numbers(form, listed)
    return listed.view(*rows_TK.shape, listed.shape[1])


def _numbers(rows_ND: torch.Tensor, form: str, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a cache in a format as numbers."""
    return rows_ND.to(dtype) if form == DENSE else row_numbers(form, rows_ND, dtype)


def as_on_cpu(case: AttentionCase, target: Target) -> Verdict:
    """What the models that run on the CPU need."""
    if case.rope_extra or not case.window or not case.sink:
        return no("wants a window, sinks, and keys as wide as values")
    if case.lse:
        return no("returns no log-sum-exp")
    return on_cpu(case, target)


def _with_sinks(rows: int, heads: int, keys: int, sink_H: torch.Tensor) -> torch.Tensor:
    """fp32 [T, H, keys + 1] for scores, the sinks in the last column."""
    scores_THN = torch.empty(rows, heads, keys + 1)
    scores_THN[..., -1] = sink_H
    return scores_THN


def _softmax(scores_THN: torch.Tensor) -> torch.Tensor:
    """In place, over window, entries and sink."""
    return torch.softmax(scores_THN, -1, out=scores_THN)


BACKENDS = (
    cpu_backend("attention.sparse_prefill", sparse_prefill, eligible=as_on_cpu),
    cpu_backend("attention.sparse_decode", sparse_decode, eligible=as_on_cpu),
)
