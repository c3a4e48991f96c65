"""The index of a decode step, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.step import StepIndexCase, Windows

Angles = tuple[torch.Tensor, torch.Tensor]  # table [N, R / 2, 2] and frequencies [R / 2]


def index_decode(
    case: StepIndexCase,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    tables_NM: torch.Tensor,
    draft_rows: int,
    sliding: Angles,
    compressing: Angles,
) -> tuple[torch.Tensor, ...]:
    positions_T1, slots_T1 = positions_T.unsqueeze(1), slots_T.unsqueeze(1)
    tables_TM = tables_NM.index_select(0, slots_T)
    end = tables_NM.shape[1] * case.block_tokens * case.shards
    some_T = positions_T.clamp(min=0)
    ring = case.window + draft_rows
    back_W = torch.arange(1 - case.window, 1, device=positions_T.device)
    found = [
        _angles(sliding, some_T, end),
        _angles(compressing, some_T, end),
        slots_T * ring + positions_T % ring,
        _ring_rows(slots_T1, positions_T1 + back_W, ring),
    ]
    for windows in case.windows:
        found += _windows(case, windows, positions_T1, slots_T1, tables_TM, draft_rows)
        first_T = some_T // windows.ratio * windows.ratio
        found.insert(len(found) - 1, _angles(compressing, first_T, end))
    return tuple(found)


def _windows(
    case: StepIndexCase,
    windows: Windows,
    positions_T1: torch.Tensor,
    slots_T1: torch.Tensor,
    tables_TM: torch.Tensor,
    draft_rows: int,
) -> list[torch.Tensor]:
    """All that the contract lists for a ratio but angles."""
    ratio, device = windows.ratio, positions_T1.device
    ring, per_block = windows.span + draft_rows, case.block_tokens // ratio
    seen_T1 = (positions_T1 + 1) // ratio
    is_open_T1 = (seen_T1 * ratio != positions_T1 + 1).logical_or_(positions_T1 < 0)
    window_T1 = positions_T1.clamp(min=0) // ratio
    is_open_T1.logical_or_(window_T1 // per_block % case.shards != case.shard)
    per_round = per_block * case.shards
    own_T1 = (seen_T1 % per_round - case.shard * per_block).clamp_(0, per_block)
    own_T1 += seen_T1 // per_round * per_block
    back_S = torch.arange(1 - windows.span, 1, device=device)
    closing_TS = _ring_rows(slots_T1, positions_T1 + back_S, ring)
    target_T1 = tables_TM.gather(1, window_T1 // per_round) * per_block + window_T1 % per_block
    entry_E = torch.arange(tables_TM.shape[1] * per_block, device=device)
    rows_TE = tables_TM[:, entry_E // per_block] * per_block + entry_E % per_block
    rows_TE = rows_TE.masked_fill_(entry_E >= own_T1, -1)
    return [
        (positions_T1 % ratio).squeeze(1),
        (slots_T1 * ring + positions_T1 % ring).squeeze(1),
        closing_TS.masked_fill_(is_open_T1, -1),
        target_T1.masked_fill_(is_open_T1, -1).squeeze(1),
        torch.nn.functional.pad(rows_TE, (0, 1), value=-1),
    ]


def _angles(angles: Angles, positions_T: torch.Tensor, end: int) -> torch.Tensor:
    table_NR2, frequency_R = angles
    if end <= len(table_NR2):
        return table_NR2.index_select(0, positions_T)
    angle_TR = positions_T.unsqueeze(1).float() * frequency_R
    return torch.stack([angle_TR.cos(), angle_TR.sin()], dim=-1)


def _ring_rows(slots_T1: torch.Tensor, positions_TW: torch.Tensor, ring: int) -> torch.Tensor:
    """Ring rows of the positions, -1 for negative ones."""
    rows_TW = slots_T1 * ring + positions_TW % ring
    return rows_TW.masked_fill_(positions_TW < 0, -1)


BACKENDS = (Backend("step.index_decode", REFERENCE, index_decode),)
