"""Checks of the codes of 8 and 4 bits in kernels, on any device: against torch's own casts and
against a search, at every code, every tie and the floats next to them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from metainfer.kernels.reference.dequantise import E2M1_VALUES, decode_e2m1, scales_to_float
from metainfer.kernels.reference.formats import (
    E8M0_NAN,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    power_of_two_scale,
)
from metainfer.kernels.triton import codes as device
from metainfer.kernels.triton.launch import Launcher, has_fp8
from metainfer.ops.formats import FP4_FLOOR, FP8_FLOOR, LARGEST_CODE

BLOCK = 4096


@triton.jit
def _map(x_ptr, y_ptr, count, FUNCTION: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, place < count, other=0)
    if FUNCTION == "e4m3_to_float":
        y = device.e4m3_to_float(x, FP8)
    elif FUNCTION == "float_to_e4m3":
        y = device.float_to_e4m3(x)
    elif FUNCTION == "e2m1_to_float":
        y = device.e2m1_to_float(x)
    elif FUNCTION == "float_to_e2m1":
        y = device.float_to_e2m1(x)
    elif FUNCTION == "e8m0_to_float":
        y = device.e8m0_to_float(x)
    elif FUNCTION == "e8m0_inverse":
        y = device.e8m0_inverse(x)
    elif FUNCTION == "scale for e4m3":
        y = device.e8m0_of_amax(tl.abs(x).to(tl.int32, bitcast=True), 1e-4, "e4m3")
    else:
        floor: tl.constexpr = 7.052966104933725e-38  # 6 * 2^-126
        y = device.e8m0_of_amax(tl.abs(x).to(tl.int32, bitcast=True), floor, "e2m1")
    tl.store(y_ptr + place, y, place < count)


class Codes:
    """The functions of `codes`, run by a launcher over whole tensors of the CPU."""

    def __init__(self, launch: Launcher, device: str) -> None:
        self._launch, self._device = launch, device

    def __call__(
        self, function: str, x: torch.Tensor, dtype: torch.dtype, fp8: bool = False
    ) -> torch.Tensor:
        y = torch.empty(x.shape, dtype=dtype, device=self._device)
        grid = (triton.cdiv(x.numel(), BLOCK),)
        constants = {"FUNCTION": function, "FP8": fp8, "BLOCK": BLOCK}
        self._launch(_map, grid, x.to(self._device), y, x.numel(), **constants)
        return y.cpu()


def neighbours(values: torch.Tensor) -> torch.Tensor:
    """Each value, the floats next to it, and their negatives."""
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    near = torch.cat([values, values.nextafter(up), values.nextafter(down)])
    return torch.cat([near, -near])


def odd_floats() -> torch.Tensor:
    """Powers of two and their neighbours, subnormals, the largest floats, random bits; no NaN."""
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (40000,), generator=generator).to(torch.int32)
    near = [neighbours(factor * powers) for factor in (1.0, 1.5, 1.75)]
    extremes = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    numbers = torch.cat([*near, bits.view(torch.float32), extremes])
    return numbers[~numbers.isnan()]


def borders(codes: torch.Tensor) -> torch.Tensor:
    """Values of codes, what lies half way between neighbours, and the floats next to those."""
    values = codes.unique()
    return neighbours(torch.cat([values, (values[1:] + values[:-1]) / 2]))


EVERY_BYTE = torch.arange(256).to(torch.uint8)


def e4m3_codes_become_their_floats(launch: Launcher, device: str) -> None:
    theirs = EVERY_BYTE.view(torch.float8_e4m3fn).float()
    for fp8 in {False, has_fp8(launch)}:
        ours = Codes(launch, device)("e4m3_to_float", EVERY_BYTE, torch.float32, fp8)
        number = ~theirs.isnan()
        assert_same_bits(ours[number], theirs[number])
        assert ours[~number].isnan().all() or (fp8 and launch.interpreted)


def floats_become_the_nearest_e4m3(launch: Launcher, device: str) -> None:
    values = decode_e4m3(EVERY_BYTE)
    x = torch.cat([borders(values[values.isfinite()]), odd_floats()])
    assert_same(Codes(launch, device)("float_to_e4m3", x, torch.uint8), encode_e4m3(x))


def e2m1_codes_become_their_floats(launch: Launcher, device: str) -> None:
    nibbles = torch.arange(16).to(torch.uint8)
    theirs = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    assert_same_bits(Codes(launch, device)("e2m1_to_float", nibbles, torch.float32), theirs)
    assert_same_bits(decode_e2m1(nibbles[0::2] | (nibbles[1::2] << 4)), theirs)


def floats_become_the_nearest_e2m1(launch: Launcher, device: str) -> None:
    x = torch.cat([borders(torch.tensor(E2M1_VALUES)), odd_floats()])
    x = x[: len(x) // 2 * 2]
    ours = Codes(launch, device)("float_to_e2m1", x, torch.int32)
    # The nearest by search: of two that are as near, the one with the even code.
    distance = (x.abs().double().clamp(max=6.0)[:, None] - torch.tensor(E2M1_VALUES).double()).abs()
    odd = torch.arange(8) % 2
    nearest = (2 * (distance == distance.amin(1, keepdim=True)) - odd).argmax(1)
    assert_same(ours, nearest.int() | 8 * torch.signbit(x).int())
    assert_same((ours[0::2] | (ours[1::2] << 4)).to(torch.uint8), encode_e2m1(x))


def e8m0_scales_become_their_floats_and_inverses(launch: Launcher, device: str) -> None:
    run = Codes(launch, device)
    ours = run("e8m0_to_float", EVERY_BYTE, torch.float32)
    assert_same_bits(ours[:255], scales_to_float(EVERY_BYTE)[:255])
    assert ours[255].isnan()
    inverse = run("e8m0_inverse", EVERY_BYTE[1:].int(), torch.float32)
    assert_same(inverse[:253] * ours[1:254], torch.ones(253))
    assert inverse[254] == 0.0


def scales_are_the_powers_of_two_that_the_largest_needs(launch: Launcher, device: str) -> None:
    amax = torch.cat([odd_floats(), torch.tensor([torch.nan])]).abs()
    for code, floor in (("e4m3", FP8_FLOOR), ("e2m1", FP4_FLOOR)):
        exponent = power_of_two_scale(amax, code, floor)
        ours = Codes(launch, device)(f"scale for {code}", amax, torch.int32)
        assert_same(ours, torch.where(amax.isnan(), E8M0_NAN, exponent + 127))
        # The smallest power of two with which the codes reach the largest magnitude.
        finite = amax.isfinite()
        needed = amax[finite].double().clamp(min=torch.tensor(floor).float().double())
        scale = torch.ldexp(torch.ones_like(needed), exponent[finite])
        assert (LARGEST_CODE[code] * scale >= needed).all()
        assert (LARGEST_CODE[code] * scale / 2 < needed).all()


CHECKS = (
    e4m3_codes_become_their_floats,
    floats_become_the_nearest_e4m3,
    e2m1_codes_become_their_floats,
    floats_become_the_nearest_e2m1,
    e8m0_scales_become_their_floats_and_inverses,
    scales_are_the_powers_of_two_that_the_largest_needs,
)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    differ = (ours != theirs).nonzero().flatten()
    assert not len(differ), f"{len(differ)} differ, the first at {int(differ[0])}"


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert_same(ours.view(torch.int32), theirs.view(torch.int32))
