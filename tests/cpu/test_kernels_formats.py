"""Formats of rows: bytes by hand, round trips, edges; the ops that write them, against loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.compare import run
from metainfer.kernels.reference.formats import (
    decode_index,
    decode_rows,
    encode_e2m1,
    encode_index,
    encode_rows,
    hadamard,
)
from metainfer.ops.cache import CacheWriteCase
from metainfer.ops.catalogue import OPS
from metainfer.ops.formats import FORMATS, INDEX_FORMATS, LARGEST_CODE, RowFormat
from metainfer.ops.index_codes import IndexEncodeCase
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.quantise import QuantiseFp8Case
from tests.fakes.op_checks import assert_near
from tests.fakes.op_inputs import Call, make

REGISTRY = builtin_registry()
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()


def results(op: str, case: Any, call: Call) -> tuple[torch.Tensor, ...]:
    return run(REGISTRY, op, REFERENCE, case, call)


def nearest(value: float, values: list[float]) -> int:
    """The code of a magnitude: the nearest value, the even code of two."""
    distances = [abs(min(value, values[-1]) - other) for other in values]
    best = [code for code, distance in enumerate(distances) if distance == min(distances)]
    return min(best, key=lambda code: code % 2)


def by_hand(form: Any, block: list[float]) -> tuple[list[int], float]:
    """Codes and scale of one block in Python's own numbers."""
    amax = max(map(abs, block))
    values = E4M3 if form.code == "e4m3" else E2M1
    if form.scale == "e4m3":
        scale = E4M3[nearest(min(max(amax / 6, 2.0**-9), 448.0), E4M3)]
    else:
        scale = 2.0 ** math.ceil(math.log2(max(amax, form.floor) / LARGEST_CODE[form.code]))
    sign = len(values) + 1 if form.code == "e4m3" else len(values)
    codes = [nearest(abs(x) / scale, values) + sign * (math.copysign(1, x) < 0) for x in block]
    return codes, scale


def wide(rows: int, width: int) -> torch.Tensor:
    """Rows of numbers around 2^-12, 1 and 2^12, and a row of zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, width, generator=generator)
    x *= torch.exp2(12.0 * (torch.arange(rows) % 3 - 1)).unsqueeze(1)
    x[-1] = 0.0
    return x


def unpacked(form: Any, codes: torch.Tensor) -> list[int]:
    if form.code == "e4m3":
        return codes.tolist()
    return [byte >> shift & 15 for byte in codes.tolist() for shift in (0, 4)]


@pytest.mark.parametrize("form", [*FORMATS.values(), *INDEX_FORMATS.values()], ids=lambda f: f.name)
def test_codes_and_scales_are_those_of_a_loop(form: Any) -> None:
    x = wide(4, form.width)
    if isinstance(form, RowFormat):
        kept = encode_rows(form.name, x)
        numbers = decode_rows(form.name, kept)
        codes = kept[:, : form.code_bytes]
    else:
        codes, scales = encode_index(form.name, x)
        numbers = decode_index(form.name, codes, scales)
    values = E4M3 if form.code == "e4m3" else E2M1
    for row in range(len(x)):
        found = unpacked(form, codes[row])
        for block in range(form.blocks):
            part = slice(block * form.block, (block + 1) * form.block)
            expected, scale = by_hand(form, x[row, part].double().tolist())
            assert found[part] == expected
            sign = 128 if form.code == "e4m3" else 8
            decoded = [(-1 if c >= sign else 1) * values[c % sign] * scale for c in expected]
            assert numbers[row, part].double().tolist() == decoded


def test_places_in_a_row() -> None:
    """What lies where, byte by byte."""
    x = torch.ones(1, 576)
    v4 = encode_rows("v4_fp8", x[:, :512])[0].tolist()
    assert v4[:448] == [0x78] * 448  # 1 = 256 * 2^-8
    assert v4[448:576] == [0x80, 0x3F] * 64  # 1 in bf16
    assert v4[576:] == [127 - 8] * 7 + [0] * 9
    v41 = encode_rows("v41_fp8", x[:, :512])[0].tolist()
    assert v41 == [0x78] * 512 + [119] * 16
    fp4 = encode_rows("v41_fp4", 6 * x[:, :512])[0].tolist()
    assert fp4 == [0x77] * 256 + [0x38] * 32  # 6 times 1 in e4m3
    mla = encode_rows("mla_fp8", x)[0].tolist()
    assert mla == [0x78] * 512 + [0, 0, 0x80, 0x3B] * 4 + [0x80, 0x3F] * 64
    codes, scales = encode_index("index_fp4", torch.tensor([0.5, -4.0] * 64).view(1, 128))
    assert codes[0].tolist() == [0xE1] * 64
    assert scales[0].tolist() == [127] * 4
    assert [form.row_bytes % 16 for form in FORMATS.values()] == [0] * 4


@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinity_stay_in_their_block(name: str) -> None:
    form = FORMATS[name]
    x = wide(3, form.width)
    x[0, 5] = torch.nan
    x[1, form.block + 1] = -torch.inf
    numbers = decode_rows(name, encode_rows(name, x))
    clean = x.clone()
    clean[0, 5], clean[1, form.block + 1] = 0.0, 0.0
    others = decode_rows(name, encode_rows(name, clean))
    bad = torch.zeros_like(x, dtype=torch.bool)
    bad[0, : form.block] = bad[1, form.block : 2 * form.block] = True
    assert numbers[0, : form.block].isnan().all()
    assert torch.equal(numbers[~bad], others[~bad])
    # 448 * 2^120 is more than fp32 holds.
    assert numbers[1, form.block + 1] == (-2688.0 if form.scale == "e4m3" else -torch.inf)
    assert not numbers[1].isnan().any()
    assert encode_rows(name, x)[0, : form.block // 2].eq(0).all()


def test_ties_of_e2m1_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    low = encode_e2m1(ties)
    assert [byte >> shift & 15 for byte in low.tolist() for shift in (0, 4)] == [
        0, 2, 2, 4, 4, 6, 6, 7,
    ]  # fmt: skip


def test_hadamard_is_the_matrix_of_shared_bits() -> None:
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)])
    x = wide(3, 128)
    expected = x.double() @ signs.double() * 128**-0.5
    assert_near(hadamard(x), expected.float(), 1e-6)
    assert_near(hadamard(hadamard(x)), x, 1e-6)


def test_cache_write_is_its_parts() -> None:
    case = CacheWriteCase("mla_fp8", 576, 64, "rms", norm_width=512)
    call = make("cache.write", case, "7 rows")
    x_TD, weight_D, rotation_TR2, before, rows_T = (t.clone() for t in call.arguments)
    y_TD, cache = results("cache.write", case, call)
    latent = x_TD[:, :512].double()
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight_D
    pairs = torch.view_as_complex(x_TD[:, 512:].double().unflatten(-1, (32, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.view_as_complex(rotation_TR2.double())).flatten(-2)
    assert_near(y_TD, torch.cat([latent, turned], -1), 1 / 14)
    for row, place in enumerate(rows_T.tolist()):
        if place >= 0:
            assert torch.equal(
                decode_rows("mla_fp8", cache[place : place + 1])[0], y_TD[row].float()
            )
    others = [place for place in range(len(cache)) if place not in rows_T.tolist()]
    assert torch.equal(cache[others], before[others])
    assert 0 < (rows_T < 0).sum() < len(rows_T)


def test_index_keys_keep_their_products() -> None:
    """The rotation by the Hadamard matrix leaves products as they are, up to the codes' steps."""
    case = IndexEncodeCase("index_fp8", 4)
    q_THI = make("index.encode_queries", case, "7 rows").arguments[0].double()
    products = []
    for one in (case, replace(case, hadamard=False)):
        coded = results("index.encode_queries", one, make("index.encode_queries", case, "7 rows"))
        numbers = decode_index("index_fp8", *coded).double()
        products.append(numbers @ numbers.transpose(1, 2))
    assert_near(products[0], q_THI @ q_THI.transpose(1, 2), 0.05)
    assert_near(products[1], products[0], 0.05)


@pytest.mark.parametrize("scale", ["e8m0", "fp32"])
def test_scales_of_activations_are_the_same_powers_in_both_forms(scale: str) -> None:
    case = QuantiseFp8Case(1, 96, group=32, scale=scale)
    call = make("quantise.fp8", case, "wide")
    x_TI = call.arguments[0].flatten(1).double()
    codes, scales = results("quantise.fp8", case, call)
    powers = torch.exp2(scales.double() - 127) if scale == "e8m0" else scales.double()
    assert codes.shape == (9, 96) and scales.shape == (9, 3)
    numbers = codes.view(torch.float8_e4m3fn).double() * powers.repeat_interleave(32, -1)
    step = torch.maximum(x_TI.abs() / 16, powers.repeat_interleave(32, -1) * 2.0**-10)
    assert ((numbers - x_TI).abs() <= step).all()


@pytest.mark.parametrize("case", OPS["norm.layer_norm_rotate"].small_cases, ids=str)
def test_layer_norm_rotate(case: Any) -> None:
    call = make("norm.layer_norm_rotate", case, "7 rows")
    x_TD, weight_D, bias_D, rotation_TR2 = call.arguments
    normed = torch.nn.functional.layer_norm(
        x_TD.double(), (case.width,), weight_D.double(), bias_D.double(), case.eps
    )
    rope = replace(OPS["rope.rotate"].small_cases[0], heads=1, width=case.width, dtype="float32")
    rope = replace(
        rope, rope_width=case.rope_width, interleaved=case.interleaved, leading=case.leading
    )
    (expected,) = results("rope.rotate", rope, Call((), (normed.float()[:, None], rotation_TR2)))
    (ours,) = results("norm.layer_norm_rotate", case, call)
    assert_near(ours, expected[:, 0], OPS["norm.layer_norm_rotate"].tolerance.of(case.dtype))


@pytest.mark.parametrize("case", OPS["norm.rms_norm_fp8"].small_cases, ids=str)
def test_rms_norm_fp8_is_its_parts(case: Any) -> None:
    call = make("norm.rms_norm_fp8", case, "7 rows")
    x_TD, residual_TD, weight_D = call.arguments
    sum_TD = x_TD if residual_TD is None else (x_TD.double() + residual_TD.double()).to(x_TD.dtype)
    y_TD = sum_TD.double() / (sum_TD.double().square().mean(-1, keepdim=True) + case.eps).sqrt()
    codes, scales, *others = results("norm.rms_norm_fp8", case, call)
    powers = torch.exp2(scales.double() - 127) if case.scale == "e8m0" else scales.double()
    numbers = codes.view(torch.float8_e4m3fn).double() * powers.repeat_interleave(case.group, -1)
    assert_near(numbers, y_TD * weight_D, 1 / 14)
    assert len(others) == case.normed + case.adds
    if case.normed:
        assert_near(others[0], y_TD * weight_D, 1e-2)
    if case.adds:
        assert torch.equal(others[-1], sum_TD)
