"""The experts' parts in Triton: the order of rows, weights in their own forms, codes in registers,
and tiles of every shape in the interpreter."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from metainfer.kernels.compare import Poisoned, compare, run
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.reference import BACKENDS as REFERENCES
from metainfer.kernels.reference.dequantise import E2M1_VALUES, fp4_group
from metainfer.kernels.reference.formats import decode_e4m3
from metainfer.kernels.registry import Backend, Registry
from metainfer.kernels.triton import moe, moe_weights
from metainfer.kernels.triton.code_words import E2M1_TO_BF16_BY_NIBBLE, E2M1_TO_E4M3_BY_NIBBLE
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.kernels.triton.moe_order import order
from metainfer.kernels.triton.moe_tiles import Tile, Tiles, tiles_of
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.moe import ExpertsFp8RowsCase
from tests.fakes.op_inputs import make
from tests.fakes.ptx_words import assembly

OP = "moe.experts_fp8_rows"
LAUNCH = JitLauncher((9, 0), 132)
FP4, V41, FP8 = OPS[OP].small_cases


def words_of(count: int) -> torch.Tensor:
    """int64 below 2^32; every byte is there in every place."""
    generator = torch.Generator().manual_seed(0)
    bytes_NB = torch.stack([torch.randperm(256, generator=generator) for _ in range(4)], 1)
    bytes_NB = bytes_NB.repeat(count // 256, 1)
    return (bytes_NB << (8 * torch.arange(4))).sum(1)


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """[N, 4]."""
    return words.unsqueeze(1) >> (8 * torch.arange(4)) & 0xFF


def e2m1(nibbles: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor(E2M1_VALUES)
    return torch.cat([magnitudes, -magnitudes])[nibbles]


def test_bytes_in_registers_become_e4m3() -> None:
    words = words_of(256)
    for shift in range(-5, 7):
        added = torch.full_like(words, (shift + 5 << 3) * 0x01010101)
        halves = assembly(E2M1_TO_E4M3_BY_NIBBLE.value, 2, [words, added])
        for place, codes in enumerate(halves):
            numbers = decode_e4m3(bytes_of(codes).to(torch.uint8))
            expected = e2m1(bytes_of(words) >> (4 * place) & 15) * 2.0**shift
            assert torch.equal(numbers, expected)
            assert torch.equal(numbers.signbit(), expected.signbit())


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**100])
def test_bytes_in_registers_become_bf16(scale: float) -> None:
    words = words_of(256)
    half = int(torch.tensor(scale).bfloat16().view(torch.int16)) & 0xFFFF
    pair = torch.full_like(words, half * 0x00010001)
    results = assembly(E2M1_TO_BF16_BY_NIBBLE.value, 4, [words, pair, pair])
    for place in (0, 1):
        pairs = torch.stack(results[2 * place : 2 * place + 2], 1)
        bits = torch.stack([pairs & 0xFFFF, pairs >> 16], 2).flatten(1)
        numbers = bits.to(torch.int32).to(torch.int16).view(torch.bfloat16).float()
        assert torch.equal(numbers, e2m1(bytes_of(words) >> (4 * place) & 15) * scale)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("rows", "selected", "experts", "height"), [(2, 2, 5, 16), (64, 6, 256, 16), (300, 4, 12, 64)]
)
def test_slots_lie_in_the_order_of_their_experts(
    rows: int, selected: int, experts: int, height: int, empty: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids_TK = torch.rand(rows, experts, generator=generator).argsort(1)[:, :selected].contiguous()
    if empty:
        ids_TK[::3], ids_TK[1::3, 0] = -1, experts
    with Poisoned():
        found = order(LAUNCH, ids_TK, experts, height)
    assert found.slots is not None
    assert len(found.slots) == found.tiles
    first = 0
    for expert in range(experts):
        expected = (ids_TK.flatten() == expert).nonzero().flatten()
        tiles = -(-len(expected) // height)
        slots = found.slots[first : first + tiles].flatten().long()
        assert torch.equal(slots[: len(expected)], expected)
        assert (slots[len(expected) :] == -1).all()
        assert (found.experts[first : first + tiles] == expert).all()
        first += tiles
    assert (found.experts[first:] == -1).all()
    assert (found.slots[first:] == -1).all()


def weights_of(apart: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(apart)
    packed = torch.randint(0, 256, (2, 8, 64), generator=generator).to(torch.uint8)
    scale = torch.randint(0, apart + 1, (2, 8, 4), generator=generator) + 100
    scale[:, :, 0], scale[0, 0, 1] = 100 + apart, 100
    return packed, scale.to(torch.uint8)


def in_order(packed: torch.Tensor) -> torch.Tensor:
    """Nibbles of repacked codes in the order of their columns."""
    groups = packed.unflatten(-1, (-1, 16))
    return torch.cat([groups & 15, groups >> 4], dim=-1).flatten(-2)


def test_folded_codes_times_factors_are_the_weights() -> None:
    packed, scale = weights_of(11)
    matrix = moe_weights.folded_matrix("down", (packed, scale))
    assert matrix.form == "folded"
    assert matrix.scales is not None and matrix.factors is not None
    shift = (matrix.scales >> 3).double() - 5
    # What products see: each of these is an e4m3 number.
    codes = e2m1(in_order(matrix.codes).long()) * torch.exp2(shift).repeat_interleave(32, -1)
    assert torch.equal(codes.to(torch.float8_e4m3fn).double(), codes)
    numbers = codes * matrix.factors.double().unsqueeze(-1)
    assert torch.equal(numbers.float(), fp4_group(packed, scale))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda scale: scale[0, 0, 1:2].fill_(99), r"scales of a row are 2\^12 apart"),
        (lambda scale: scale[1, 3, 2:3].fill_(255), "a scale is NaN"),
        (lambda scale: scale.sub_(99), "below the normal numbers"),
    ],
)
def test_what_cannot_be_folded_is_left_and_said(
    spoil: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    packed, scale = weights_of(11)
    scale = scale.clamp(min=100, max=111)
    if "below" in reason:
        scale = scale.clamp(max=104)
    spoil(scale)
    with caplog.at_level(logging.INFO):
        matrix = moe_weights.folded_matrix("down", (packed, scale))
    assert matrix.form == "fp4"
    assert torch.equal(matrix.scales, scale)
    found = [record.getMessage() for record in caplog.records]
    assert any("down of experts is multiplied in bf16" in message for message in found)
    assert any(re.search(reason, message) for message in found)


def check(case: ExpertsFp8RowsCase, call: Call, tiles: Tiles | None, again: Call) -> None:
    backend = Backend(
        OP, "ours", partial(moe.experts_fp8_rows, LAUNCH, tiles=tiles), prepare=moe.prepare_fp8_rows
    )
    registry = Registry((*REFERENCES, backend))
    expected = run(registry, OP, REFERENCE, case, call)
    with Poisoned():
        actual = run(registry, OP, "ours", case, again)
    found = compare(OP, case, call, actual, expected)
    assert not found.problem, found.problem


TILES = [
    Tiles(16, Tile(32, 128, 4, 3, swap=True), Tile(64, 128, 4, 3, swap=True)),
    Tiles(64, Tile(128, 128, 4, 3, band=2), Tile(128, 64, 4, 3, band=1)),
    Tiles(32, Tile(64, 64, 8, 3, swap=True), Tile(256, 128, 8, 3)),
]


@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: f"{tiles.rows} slots")
@pytest.mark.parametrize("case", [FP4, FP8], ids=lambda case: case.weight_format)
def test_tiles_of_every_shape_give_the_same(case: ExpertsFp8RowsCase, tiles: Tiles) -> None:
    variant = "67 rows" if tiles.rows == 64 else "few experts"
    calls = [make(OP, case, variant) for _ in range(2)]
    check(case, calls[0], tiles, calls[1])


def test_channels_that_no_step_fills() -> None:
    """A rank's part of V4.1: 9 groups of 32 channels."""
    case = replace(V41, inner=288)
    check(case, make(OP, case, "5 rows"), None, make(OP, case, "5 rows"))


def test_tiles_grow_with_rows() -> None:
    case = OPS[OP].cases["deepseek-v4-flash"][0]
    heights = [tiles_of(case, rows, (9, 0), True).rows for rows in (1, 64, 512, 8192, 65536)]
    assert heights == sorted(heights)
    assert heights[0] == 16
    assert heights[-1] == 128
