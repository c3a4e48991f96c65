"""Kernels in Gluon, which Triton does not interpret, on a machine of our own against the
reference; every code of every format through the assembly that decodes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from metainfer.kernels.compare import Poisoned, near
from metainfer.kernels.inputs import attention
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.reference import attention as reference
from metainfer.kernels.reference.formats import decode_e2m1, decode_e4m3
from metainfer.kernels.triton import attention_decode
from metainfer.kernels.triton.attention_decode import Tile, tile_of
from metainfer.kernels.triton.code_words import E2M1_TO_BF16, E4M3_TO_BF16
from metainfer.ops.attention import AttentionCase
from tests.fakes.gluon_machine import GluonLauncher
from tests.fakes.ptx_words import assembly

V4 = AttentionCase(3, 512, 40, ratio=4, topk=50)
MLA = AttentionCase(3, 512, 0, ratio=1, topk=70, rope_extra=64, scale=0.0625, sink=False, lse=True)
CASES = {
    "dense": V4,
    "window": replace(V4, ratio=0, topk=0, lse=True),
    "v4 window": replace(V4, ratio=0, topk=0, window_format="v4_fp8"),
    "v4": replace(V4, window_format="v4_fp8", entry_format="v4_fp8", lse=True),
    "v41": replace(V4, ratio=2, window_format="v41_fp8", entry_format="v41_fp4"),
    "mla dense": MLA,
    "mla": replace(MLA, entry_format="mla_fp8"),
}
TILES = (
    Tile("mma", 16, 32, 4),
    Tile("mma", 32, 16, 8, held=256, warps_m=2),
    Tile("wgmma", 64, 64, 8),
)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sparse_decode(name: str, tile: Tile, splits: int) -> None:
    case = CASES[name]
    if name in ("dense", "mla dense"):
        tile = replace(tile, buffers=3)
    gaps = partial(attention.sparse_decode, rows=3)
    full = partial(attention.sparse_decode, rows=1, full=True, sharpness=20.0)
    for make in (gaps, full) if splits == 1 else (gaps,):
        launch = GluonLauncher((9, 0), 4)
        call = make(case, Draw(5))
        expected = reference.sparse_decode(case, *call.arguments)
        with Poisoned():
            actual = attention_decode.run(launch, case, *call.arguments, tile=tile, splits=splits)
        assert launch.ran == [f"decode_{tile.kernel}"] + ["merge_shards"] * (splits > 1)
        ours, theirs = (actual, expected) if case.lse else ((actual,), (expected,))
        for one, other in zip(ours, theirs, strict=True):
            found = near(one, other, 2e-2 if one.dim() == 3 else 1e-5)
            assert not found.problem, found.problem


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("heads", [8, 24, 64])
def test_heads_that_fill_no_program(heads: int, capability: tuple[int, int]) -> None:
    case = AttentionCase(heads, 512, 8, ratio=4, topk=6)
    call = attention.sparse_decode(case, Draw(6), rows=2)
    assert tile_of(case, capability).kernel != "plain"
    with Poisoned():
        out_THD = attention_decode.run(GluonLauncher(capability, 4), case, *call.arguments)
    found = near(out_THD, reference.sparse_decode(case, *call.arguments), 2e-2)
    assert not found.problem, found.problem


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_rows_that_see_nothing(tile: Tile) -> None:
    for case in (CASES["mla"], replace(CASES["v4"], sink=False)):
        call = attention.sparse_decode(case, Draw(7), rows=2, columns=0)
        if case.window:
            call.arguments[2].fill_(-1)
        with Poisoned():
            out_THD, lse_TH = attention_decode.run(
                GluonLauncher((9, 0), 4), case, *call.arguments, tile=tile
            )
        assert not out_THD.any() and lse_TH.isneginf().all()


def numbers(words: list[torch.Tensor]) -> torch.Tensor:
    """float64 [..., 2 * words]: the bf16 numbers of words in order."""
    pairs = torch.stack(words, dim=-1)
    halves = torch.stack([pairs & 0xFFFF, pairs >> 16], dim=-1).flatten(-2)
    return (halves << 16).to(torch.int32).view(torch.float32).double()


@pytest.mark.parametrize("power", [-127, -126, -30, 0, 100])
def test_every_e4m3_code_is_decoded_exactly(power: int) -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127])
    words = codes | codes.flip(0) << 8 | codes << 16 | codes.flip(0) << 24
    scale = 0x0040 if power == -127 else (power + 127) << 7
    scales = torch.full_like(words, scale | scale << 16)
    actual = numbers(assembly(E4M3_TO_BF16.value, 2, [words, scales]))
    both = torch.stack([codes, codes.flip(0), codes, codes.flip(0)], dim=-1).to(torch.uint8)
    expected = decode_e4m3(both).double() * 2.0**power
    # What bf16 cannot hold is rounded as it rounds.
    assert torch.equal(actual, expected.bfloat16().double())


def test_every_e2m1_code_is_decoded_exactly() -> None:
    low = torch.arange(2**16)
    words = low | (low.flip(0) << 16)
    for scale in (0.001953125, 1.0, 0.8125, 448.0):
        half = int(torch.tensor(scale).view(torch.int32)) >> 16
        scales = torch.full_like(words, half | half << 16)
        actual = numbers(assembly(E2M1_TO_BF16.value, 4, [words, scales]))
        packed = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=-1)
        expected = decode_e2m1(packed.to(torch.uint8)).double() * scale
        assert torch.equal(actual, expected)
