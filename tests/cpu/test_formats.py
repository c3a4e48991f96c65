"""Number formats: decoding against first principles, encoding by nearest rounding."""

from __future__ import annotations

import pytest
import torch

from metainfer.weights.formats import (
    DenseWeight,
    Fp4GroupWeight,
    Fp8BlockWeight,
    encode_fp4_group,
    encode_fp8_block,
)
from metainfer.weights.formats.fp4_group import E2M1_MAGNITUDES, pack_e2m1, unpack_e2m1
from metainfer.weights.formats.scales import covering_e8m0, decode_e8m0

ALL_BYTES = torch.arange(256).to(torch.uint8)


def test_e8m0_is_a_power_of_two_for_every_byte() -> None:
    decoded = decode_e8m0(ALL_BYTES)
    expected = torch.tensor([2.0 ** (byte - 127) for byte in range(255)], dtype=torch.float64)
    assert torch.equal(decoded[:255].double(), expected)
    assert decoded[0] == 2.0**-127
    assert decoded[255].isnan()
    of_torch = ALL_BYTES.view(torch.float8_e8m0fnu).to(torch.float32)
    assert torch.equal(decoded[:255], of_torch[:255])


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_covering_scale_is_the_smallest_power_of_two(largest: float) -> None:
    limits = largest * 2.0 ** torch.arange(-20, 20, dtype=torch.float32)
    amax = torch.cat([limits, limits.nextafter(torch.tensor(torch.inf)), limits * 0.7])
    scale = decode_e8m0(covering_e8m0(amax, largest))
    assert (amax / scale <= largest).all()
    assert (amax / (scale / 2) > largest).all()
    assert torch.equal(scale[:20], limits[:20] / largest)  # the limit itself still fits
    assert decode_e8m0(covering_e8m0(torch.zeros(1), largest)) == 1.0


def test_e2m1_even_column_is_the_low_nibble() -> None:
    packed = torch.tensor([0x21, 0xF7], dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        assert unpack_e2m1(packed, dtype).tolist() == [0.5, 1.0, 6.0, -6.0]


def test_e2m1_every_byte_comes_back() -> None:
    values = unpack_e2m1(ALL_BYTES, torch.float32)
    assert values.abs().unique().tolist() == list(E2M1_MAGNITUDES)
    assert torch.equal(pack_e2m1(values), ALL_BYTES)  # -0 too


def test_e2m1_rounds_to_nearest_ties_to_even() -> None:
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    values = torch.linspace(-7, 7, 4001).repeat_interleave(2)
    rounded = unpack_e2m1(pack_e2m1(values), torch.float32)
    nearest = (values.abs()[:, None] - magnitudes).abs().min(dim=1).values
    assert torch.equal((values.abs() - rounded.abs()).abs(), nearest)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    rounded_ties = unpack_e2m1(pack_e2m1(ties.repeat_interleave(2)), torch.float32)[::2]
    assert rounded_ties.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("shape", [(128, 256), (200, 130), (1, 1), (129, 128)])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float32])
def test_fp8_dequantise(shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(shape, generator=generator).mul(50).to(torch.float8_e4m3fn)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    if scale_dtype is torch.uint8:
        scale = torch.randint(100, 140, blocks, generator=generator, dtype=torch.uint8)
        factors = 2.0 ** (scale.double() - 127)
    else:
        scale = torch.rand(blocks, generator=generator)
        factors = scale.double()
    weight = Fp8BlockWeight(codes, scale)
    rows = torch.arange(shape[0]) // 128
    columns = torch.arange(shape[1]) // 128
    expected = codes.double() * factors[rows[:, None], columns]
    assert weight.shape == shape
    assert weight.nbytes == codes.numel() + scale.nbytes
    assert torch.equal(weight.dequantise(torch.float32), expected.float())
    if scale_dtype is torch.uint8:
        assert torch.equal(weight.dequantise(torch.bfloat16).double(), expected)


@pytest.mark.parametrize("shape", [(256, 128), (130, 200), (3, 5)])
def test_fp8_encode_is_nearest_and_stable(shape: tuple[int, int]) -> None:
    weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight_OI[0, 0] = 3.5
    encoded = encode_fp8_block(weight_OI)
    decoded = encoded.dequantise(torch.float32)
    # Half a code step: 2^-4 of the value, or half the smallest subnormal times the scale.
    scale = decode_e8m0(encoded.scale).amax()
    assert (
        (decoded - weight_OI).abs() <= torch.maximum(weight_OI.abs() / 16, scale * 2**-10)
    ).all()
    assert decoded[0, 0] == 3.5
    again = encode_fp8_block(decoded)
    assert torch.equal(again.dequantise(torch.float32), decoded)
    assert torch.equal(encode_fp8_block(weight_OI.bfloat16()).scale, encoded.scale)


def test_fp8_encode_extremes() -> None:
    for value in (0.0, 448.0, 448.01, 1e-40, 3e38):
        weight_OI = torch.full((2, 3), value)
        decoded = encode_fp8_block(weight_OI).dequantise(torch.float32)
        assert decoded.isfinite().all()
        assert (decoded - weight_OI).abs().max() <= value / 16


@pytest.mark.parametrize("stack", [(), (3,)])
def test_fp4_dequantise(stack: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    packed = torch.randint(0, 256, (*stack, 5, 32), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 250, (*stack, 5, 2), generator=generator, dtype=torch.uint8)
    weight = Fp4GroupWeight(packed, scale)
    assert weight.shape == (*stack, 5, 64)
    assert weight.nbytes == packed.numel() + scale.numel()
    signed = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=torch.float64)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    expected = signed[codes.long()] * 2.0 ** (scale.double() - 127).repeat_interleave(32, -1)
    assert torch.equal(weight.dequantise(torch.float32).double(), expected)
    assert torch.equal(weight.dequantise(torch.bfloat16).double(), expected)
    assert torch.equal(weight.dequantise(torch.float16), expected.float().half())


def test_fp4_encode_is_nearest_and_stable() -> None:
    weight_OI = torch.randn(17, 96, generator=torch.Generator().manual_seed(2))
    encoded = encode_fp4_group(weight_OI)
    assert encoded.scale_OG.shape == (17, 3)
    decoded = encoded.dequantise(torch.float32)
    step = decode_e8m0(encoded.scale_OG).repeat_interleave(32, -1)
    assert ((decoded - weight_OI).abs() <= step).all()  # codes are at most 2 apart
    assert torch.equal(encode_fp4_group(decoded).dequantise(torch.float32), decoded)
    assert encode_fp4_group(torch.zeros(1, 32)).dequantise(torch.float32).abs().max() == 0


def test_nan_scale_is_not_hidden() -> None:
    scale = torch.tensor([[255]], dtype=torch.uint8)
    fp8 = Fp8BlockWeight(torch.ones(2, 2).to(torch.float8_e4m3fn), scale)
    fp4 = Fp4GroupWeight(torch.full((1, 16), 0x22, dtype=torch.uint8), scale)
    assert fp8.dequantise(torch.float32).isnan().all()
    assert fp4.dequantise(torch.bfloat16).isnan().all()


def test_one_expert_of_a_stack_shares_memory() -> None:
    dense = torch.randn(4, 256, 128)
    fp8 = [encode_fp8_block(matrix) for matrix in dense]
    fp4 = [encode_fp4_group(matrix) for matrix in dense]
    stacks = (
        DenseWeight(dense),
        Fp8BlockWeight(
            torch.stack([w.codes_OI.view(torch.uint8) for w in fp8]).view(torch.float8_e4m3fn),
            torch.stack([w.scale for w in fp8]),
        ),
        Fp4GroupWeight(
            torch.stack([w.packed_OI2 for w in fp4]), torch.stack([w.scale_OG for w in fp4])
        ),
    )
    for stack in stacks:
        assert stack.shape == (4, 256, 128)
        one = stack.expert(2)
        whole = stack.dequantise(torch.float32)
        assert torch.equal(one.dequantise(torch.float32), whole[2])
        assert stack.to("cpu").shape == stack.shape
    assert stacks[0].dequantise(torch.float32).data_ptr() == dense.data_ptr()
