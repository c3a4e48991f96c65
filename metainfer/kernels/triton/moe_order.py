"""Rows in the order of their experts, without a word to the host.

A slot is one choice of one row: slot t K + k is the k-th of row t. Slots of an expert go into tiles
of BM, the last of which is padded with -1; tiles of an expert follow each other. The number of
tiles depends on the ids alone, so there is memory for as many as there can be, and tiles that are
not used have the expert -1. Ids that are no expert go nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.launch import Launcher, cdiv, next_power_of_2

_CHUNK = 512  # slots that one program puts in order
_PIECE = 64  # slots that they are compared with at a time
_FILLED = 16  # tiles that one program fills


class Order(NamedTuple):
    """
    Attributes:
        slots: int32 [tiles, BM]; None where tile n holds slot n alone.
        experts: int32 [tiles]; where there are no slots, the ids, int64 [T, K].
    """

    slots: torch.Tensor | None
    experts: torch.Tensor
    tiles: int


@triton.jit(do_not_specialize=["count"])
def count_slots(ids_ptr, counts_ptr, count, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr):
    """How many slots of a chunk go to each expert -> int32 [chunks, EP]."""
    s_C = tl.program_id(0) * C + tl.arange(0, C)
    id_C = tl.load(ids_ptr + s_C, s_C < count, -1)
    is_expert_C = (id_C >= 0) & (id_C < E)
    found_E = tl.histogram(tl.where(is_expert_C, id_C, 0).to(tl.int32), EP, mask=is_expert_C)
    tl.store(counts_ptr + tl.program_id(0) * EP + tl.arange(0, EP), found_E)


@triton.jit(do_not_specialize=["count", "chunks", "tiles"])
def place_slots(
    ids_ptr,
    counts_ptr,
    slots_ptr,
    experts_ptr,
    count,
    chunks,
    tiles,
    E: tl.constexpr,
    EP: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Puts C slots where they go, and fills BT tiles: their experts and their padding.

    Args:
        counts_ptr: of `count_slots`; not read where one chunk of S slots holds all (ALONE).
    """
    program = tl.program_id(0)
    e_E = tl.arange(0, EP)
    s_C = program * C + tl.arange(0, C)
    id_C = tl.load(ids_ptr + s_C, s_C < count, -1)
    is_expert_C = (id_C >= 0) & (id_C < E)
    id_C = tl.where(is_expert_C, id_C, 0).to(tl.int32)
    before_E = tl.zeros([EP], tl.int32)
    if ALONE:
        all_S = tl.arange(0, S)
        all_id_S = tl.load(ids_ptr + all_S, all_S < count, -1)
        counts_S = (all_id_S >= 0) & (all_id_S < E)
        total_E = tl.histogram(tl.where(counts_S, all_id_S, 0).to(tl.int32), EP, mask=counts_S)
    else:
        total_E = tl.zeros([EP], tl.int32)
        for first in range(0, chunks, 16):
            o_O = first + tl.arange(0, 16)
            at_OE = o_O[:, None] * EP + e_E[None, :]
            found_OE = tl.load(counts_ptr + at_OE, (o_O < chunks)[:, None], 0)
            before_E += tl.sum(tl.where((o_O < program)[:, None], found_OE, 0), 0)
            total_E += tl.sum(found_OE, 0)
    of_expert_E = (total_E + BM - 1) // BM
    end_E = tl.cumsum(of_expert_E, 0)
    first_E = end_E - of_expert_E
    if program * C < count:
        # The rank of a slot among the earlier ones of its expert in its chunk.
        rank_C = tl.zeros([C], tl.int32)
        begin = 0 if ALONE else program * C
        for piece in range(0, S, P):
            o_P = begin + piece + tl.arange(0, P)
            other_P = tl.load(ids_ptr + o_P, o_P < count, -1)
            same_CP = (other_P[None, :] == id_C[:, None]) & (o_P[None, :] < s_C[:, None])
            rank_C += tl.sum(same_CP.to(tl.int32), 1)
        place_C = tl.gather(first_E * BM + before_E, id_C, 0) + rank_C
        tl.store(slots_ptr + place_C, s_C, is_expert_C)
    tile_B = program * BT + tl.arange(0, BT)
    expert_B = tl.sum((end_E[None, :] <= tile_B[:, None]).to(tl.int32), 1)
    used_B = expert_B < E
    expert_B = tl.where(used_B, expert_B, 0)
    own_B = tile_B - tl.gather(first_E, expert_B, 0)
    filled_B = tl.where(used_B, tl.gather(total_E, expert_B, 0) - own_B * BM, 0)
    tl.store(experts_ptr + tile_B, tl.where(used_B, expert_B, -1), tile_B < tiles)
    m_M = tl.arange(0, BM)
    none_BM = (m_M[None, :] >= filled_B[:, None]) & (tile_B < tiles)[:, None]
    to_BM = slots_ptr + tile_B[:, None] * BM + m_M[None, :]
    tl.store(to_BM, tl.full([BT, BM], -1, tl.int32), none_BM)


def tiles_of(slots: int, experts: int, height: int) -> int:
    """As many tiles as there can be."""
    return slots // height + min(experts, slots)


def order(launch: Launcher, ids_TK: torch.Tensor, experts: int, height: int) -> Order:
    """Tiles of `height` slots."""
    count = ids_TK.numel()
    if len(ids_TK) <= 1:
        return Order(None, ids_TK, count)
    tiles = tiles_of(count, experts, height)
    is_one = count <= _CHUNK
    chunk = max(_PIECE, next_power_of_2(count)) if is_one else _CHUNK
    placed = _PIECE if is_one else _CHUNK
    chunks = cdiv(count, chunk)
    padded = max(16, next_power_of_2(experts))
    slots = ids_TK.new_empty(tiles, height, dtype=torch.int32)
    expert_of = ids_TK.new_empty(tiles, dtype=torch.int32)
    counts = None if is_one else ids_TK.new_empty(chunks, padded, dtype=torch.int32)
    if counts is not None:
        sizes = {"E": experts, "EP": padded, "C": chunk}
        launch(count_slots, (chunks,), ids_TK, counts, count, num_warps=4, **sizes)
    launch(
        place_slots,
        (max(cdiv(count, placed), cdiv(tiles, _FILLED)),),
        ids_TK,
        counts,
        slots,
        expert_of,
        count,
        chunks,
        tiles,
        num_warps=8,
        E=experts,
        EP=padded,
        C=placed,
        S=chunk,
        P=_PIECE if is_one else _PIECE // 4,
        BM=height,
        BT=_FILLED,
        ALONE=is_one,
    )
    return Order(slots, expert_of, tiles)
