"""What is particular to the CPU's kernels: tiles, exact unpacking, weights that stay small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from metainfer.core.errors import UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.cpu import attention, cache, compress, hc, index, linear, moe, norm, rope
from metainfer.kernels.cpu.product import product
from metainfer.kernels.cpu.tiles import row_tiles
from metainfer.kernels.cpu.unpack import fp4_weights, fp8_weight
from metainfer.kernels.reference import dequantise
from metainfer.ops.base import Target
from metainfer.ops.catalogue import OPS
from metainfer.ops.moe import ExpertsCase
from tests.fakes.op_checks import check
from tests.fakes.op_inputs import VARIANTS, make

CPU = Target("cpu")
REGISTRY = builtin_registry()
MODULES = (attention, cache, compress, hc, index, linear, moe, norm, rope)
DTYPES = (torch.float32, torch.bfloat16)


def tiny_tiles(rows: int, row_elements: int, most: int = 0) -> Iterator[slice]:
    return row_tiles(rows, 1, 3)


@pytest.mark.parametrize("op", OPS)
def test_tiles_do_not_change_results(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "row_tiles", tiny_tiles)
        monkeypatch.setattr(module, "is_one_tile", lambda rows, _: rows <= 3, raising=False)
    monkeypatch.setattr(moe, "_PART_WEIGHTS", 1)
    for case in OPS[op].small_cases:
        for name in set(REGISTRY.backends(op)) & {"cpu", "cpu_expanded"}:
            if not REGISTRY.backends(op)[name].eligible(case, CPU):
                continue
            for variant in VARIANTS[op]:
                check(REGISTRY, op, name, case, variant)


def test_row_tiles_cover_all_rows_once() -> None:
    for rows, width, most in [
        (0, 5, 10),
        (1, 5, 10),
        (7, 5, 10),
        (7, 50, 10),
        (8, 5, 10),
        (3, 0, 9),
    ]:
        tiles = list(row_tiles(rows, width, most))
        assert [row for tile in tiles for row in range(tile.start, tile.stop)] == list(range(rows))
        assert all((tile.stop - tile.start) * width <= max(most, width) for tile in tiles)


def every_fp8() -> torch.Tensor:
    """[127 * 2, 256]: each finite code in every block of rows and columns."""
    codes = torch.arange(256).to(torch.uint8)
    finite = codes[(codes & 127) != 127]
    return finite.unsqueeze(1).repeat(1, 256).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bytes_", [(100, 127), (119, 120), (0, 140), (133, 134), (134, 240)])
def test_fp8_unpacks_exactly(dtype: torch.dtype, bytes_: tuple[int, int]) -> None:
    codes = every_fp8()
    scale = torch.tensor([bytes_, bytes_[::-1]], dtype=torch.uint8)
    expected = dequantise.fp8_block(codes, scale, (128, 128)).to(dtype)
    unpacked = fp8_weight(codes, scale, (128, 128)).unpack().to(dtype)
    assert torch.equal(unpacked[: len(codes)], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_with_scales_that_are_no_powers_of_two_rounds_once(dtype: torch.dtype) -> None:
    codes, scale = every_fp8(), torch.tensor([[0.3, 1e-4], [7.7, 200.1]])
    expected = dequantise.fp8_block(codes, scale, (128, 128)).to(dtype)
    assert torch.equal(fp8_weight(codes, scale, (128, 128)).unpack().to(dtype)[:254], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp4_unpacks_exactly(dtype: torch.dtype) -> None:
    packed = torch.arange(256).to(torch.uint8).view(1, 1, 256).repeat(2, 3, 1)
    other = packed.flip(2)[:, :2]
    scale = torch.arange(96).view(2, 3, 16).to(torch.uint8) + 80
    scale[0, 0, :2] = torch.tensor([0, 240])
    numbers = fp4_weights((packed, other), (scale, scale[:, :2])).unpack().to(dtype)
    expected = [dequantise.fp4_group(packed, scale), dequantise.fp4_group(other, scale[:, :2])]
    assert torch.equal(numbers, torch.cat([e.to(dtype).flatten(1) for e in expected], dim=1))


def test_weights_that_are_no_numbers_are_refused() -> None:
    codes = torch.tensor([[1, 0x7F]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(UserError, match="a code that is not a number"):
        fp8_weight(codes, torch.ones(1, 1), (128, 128))
    with pytest.raises(UserError, match="a scale of a weight in fp8 is not a number"):
        fp8_weight(codes[:, :1], torch.full((1, 1), 255, dtype=torch.uint8), (128, 128))
    with pytest.raises(UserError, match="a scale of a weight in fp4 is not a number"):
        fp4_weights((torch.zeros(1, 1, 16).to(torch.uint8),), (torch.full((1, 1, 1), 255),))


def test_quantised_weights_stay_so_and_expanded_ones_do_not() -> None:
    for op in ("linear.fp8_block", "linear.grouped", "moe.experts"):
        for case in OPS[op].cases["pebble"]:
            call, backends = make(op, case, "1 rows"), REGISTRY.backends(op)
            kept = nbytes(backends["cpu"].prepare(case, *call.weights))
            assert kept <= 1.1 * nbytes(call.weights)
            expanded = nbytes(backends["cpu_expanded"].prepare(case, *call.weights))
            # Two bytes for one, or for half of one and a scale.
            assert expanded >= (3.7 if op == "moe.experts" else 1.9) * kept


def test_verdicts() -> None:
    case = ExpertsCase(4, 2, 128, 192, 1.0, "fp8_block", (128, 128))
    for name, reason in [
        ("cpu", "192 rows of an expert do not fill blocks of 128"),
        ("cpu_expanded", ""),
    ]:
        assert REGISTRY.backends("moe.experts")[name].eligible(case, CPU).reason == reason
    assert REGISTRY.bind("moe.experts", case, CPU).backend == "reference"
    gpu = Target("cuda", (9, 0))
    for op, contract in OPS.items():
        for backend in REGISTRY.backends(op).values():
            if backend.name == "cpu":
                verdict = backend.eligible(contract.small_cases[0], gpu)
                assert verdict.reason == "runs on the CPU alone"


def parts(weights: Any) -> Iterator[torch.Tensor]:
    for weight in weights:
        if isinstance(weight, torch.Tensor):
            yield weight
        elif isinstance(weight, tuple):
            yield from parts(weight)


def nbytes(weights: Any) -> int:
    return sum(t.nbytes for t in parts((weights,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 256, 257, 511, 512, 600])
def test_product_in_few_shapes_is_the_product(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, 96, generator=generator).to(dtype)
    weight_OI = torch.randn(40, 64, generator=generator).to(dtype)
    for x_TI in (wide[:, :64].contiguous(), wide[:, 16:80]):
        y_TO = product(x_TI, weight_OI)
        assert y_TO.shape == (rows, 40) and y_TO.dtype is dtype and y_TO.is_contiguous()
        expected = (x_TI.double() @ weight_OI.double().T).to(dtype)
        near = 1e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(y_TO, expected, rtol=near, atol=near)
