"""Inputs for the index of a decode step."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.inputs.base import Call, Draw, ceil_div
from metainfer.ops.base import Load


def index_decode(
    case: Any,
    draw: Draw,
    rows: int,
    blocks: int = 4,
    padding: int = 0,
    table: int = 1000,
    drafts: int = 0,
) -> Call:
    """
    Args:
        padding: how many of the last rows are padding.
        table: positions that tables of angles have.
        drafts: rows that rings hold for drafts.
    """
    slots = rows + 1
    positions_T = draw.integers(0, blocks * case.block_tokens * case.shards, rows)
    slots_T = torch.arange(rows, device=draw.device)
    if padding:
        positions_T[-padding:], slots_T[-padding:] = -1, rows
    tables_NM = draw.integers(0, slots * blocks, slots, blocks + 3)
    if padding:
        tables_NM[-1] = -1  # the spare slot has no blocks
    return Call(
        (), _arguments(case, draw, positions_T, slots_T, tables_NM[:, :blocks], table, drafts)
    )


def index_decode_at_load(case: Any, draw: Draw, load: Load) -> Call:
    """All rows at the end of sequences of `load.tokens`."""
    blocks = ceil_div(load.tokens, case.block_tokens * case.shards)
    positions_T = torch.full((load.rows,), load.tokens - 1, device=draw.device)
    slots_T = torch.arange(load.rows, device=draw.device)
    tables_NM = draw.integers(0, load.rows * blocks, load.rows, blocks)
    return Call((), _arguments(case, draw, positions_T, slots_T, tables_NM, 2**15))


def _arguments(
    case: Any,
    draw: Draw,
    positions_T: Any,
    slots_T: Any,
    tables_NM: Any,
    table: int,
    drafts: int = 0,
) -> tuple[Any, ...]:
    pairs = case.rope_width // 2
    angles = [
        (draw.rotation(table, case.rope_width), draw.normal(pairs).abs() / 8) for _ in range(2)
    ]
    return positions_T, slots_T, tables_NM, drafts, *angles
