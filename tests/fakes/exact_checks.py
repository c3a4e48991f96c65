"""Checks of kernels that encode, on any device: byte for byte what the reference writes, where
nothing before the encoding rounds. Rows hold every code and every tie at several scales, zeros,
subnormal numbers, the largest floats, infinities and NaN."""

from __future__ import annotations

from typing import Any

import torch

from metainfer.kernels.compare import Poisoned, run, same_bytes
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.reference.dequantise import E2M1_VALUES
from metainfer.kernels.reference.formats import decode_e4m3
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton import triton_backends
from metainfer.kernels.triton.launch import Launcher
from metainfer.ops.cache import CacheWriteCase
from metainfer.ops.formats import FORMATS, INDEX_FORMATS
from metainfer.ops.index_codes import IndexEncodeCase, IndexWriteCase
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.quantise import QuantiseFp8Case
from tests.fakes.code_checks import borders


def odd_rows(width: int, block: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[T, width]; each block is of one kind."""
    e4m3 = decode_e4m3(torch.arange(256).to(torch.uint8))
    ties = torch.cat([borders(e4m3[e4m3.isfinite()]), borders(torch.tensor(E2M1_VALUES))])
    blocks = [
        *ties[: len(ties) // (block - 1) * (block - 1)].view(-1, block - 1).unbind(),
        *(torch.full((block - 1,), value) for value in (0.0, -0.0, 1e-45, 1e-39, 3.4e38, 7e-5)),
        torch.tensor([torch.inf] * (block - 1)),
    ]
    # The first of a block sets its scale: none, powers of two, and just more than a code reaches.
    tops = torch.tensor([0.0, 448.0, 448.1, -6.0, 6.001, 1e-4, -(2.0**120), 2.0**-126, 1.75])
    rows = torch.cat([torch.cat([top.view(1), one]) for one in blocks for top in tops])
    rows = torch.cat([rows, _broken(block)])
    missing = -len(rows) % width
    return torch.cat([rows, torch.ones(missing)]).view(-1, width).to(dtype)


def _broken(block: int) -> torch.Tensor:
    """Blocks with NaN or infinities at their ends and inside."""
    blocks = torch.linspace(-3.0, 3.0, 6 * block).view(6, block)
    blocks[0, 0] = blocks[1, -1] = blocks[2, block // 2] = torch.nan
    blocks[3] = torch.nan
    blocks[4, 1], blocks[5, 2] = torch.inf, -torch.inf
    blocks[4, 3] = torch.nan
    return blocks.flatten()


def readable(launch: Launcher, x: torch.Tensor) -> torch.Tensor:
    """Zero in place of what the interpreter cannot read or write as bf16: subnormal numbers."""
    return x.masked_fill(x.abs() < 2.0**-126, 0.0) if launch.interpreted else x


def places(rows: int) -> torch.Tensor:
    """Where rows are written, in a cache of 3 rows more; every fifth is not."""
    rows_T = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(7))[:rows]
    rows_T[::5] = -1
    return rows_T


def latents_are_encoded_exactly(launch: Launcher, device: str) -> None:
    for name, form in FORMATS.items():
        for dtype in ("float32", "bfloat16"):
            x_TD = odd_rows(form.width, form.block, getattr(torch, dtype))
            in_bf16 = 0 if dtype == "bfloat16" else form.coded
            x_TD[:, in_bf16:] = readable(launch, x_TD[:, in_bf16:])
            # Which of the bf16 NaNs is written is left open.
            x_TD[:, form.coded :] = x_TD[:, form.coded :].nan_to_num(2.0, torch.inf, -torch.inf)
            # Rows of the cache lie apart, and so do those of x.
            cache = torch.full((len(x_TD) + 3, 2 * form.row_bytes), 77, dtype=torch.uint8)
            cache = cache[:, 16 : 16 + form.row_bytes]
            x_TD = torch.cat([x_TD, x_TD], dim=1)[:, form.width :]
            arguments = (x_TD, None, None, cache, places(len(x_TD)))
            case = CacheWriteCase(name, form.width, dtype=dtype)
            same(launch, device, "cache.write", case, arguments)


def index_keys_and_queries_are_encoded_exactly(launch: Launcher, device: str) -> None:
    for name, form in INDEX_FORMATS.items():
        for dtype in ("float32", "bfloat16"):
            x_TI = odd_rows(128, form.block, getattr(torch, dtype))
            x_TI = readable(launch, x_TI) if dtype == "bfloat16" else x_TI
            cache = tuple(
                torch.full((len(x_TI) + 3, size), 77, dtype=torch.uint8)
                for size in (form.code_bytes, form.scale_bytes)
            )
            arguments = (x_TI, None, None, None, *cache, places(len(x_TI)))
            case = IndexWriteCase(name, hadamard=False, dtype=dtype)
            same(launch, device, "cache.write_index", case, arguments)
            q_THI = x_TI[: len(x_TI) // 3 * 3].unflatten(0, (-1, 3))
            encode = IndexEncodeCase(name, 3, hadamard=False, dtype=dtype)
            same(launch, device, "index.encode_queries", encode, (q_THI, None))


def rotated_index_codes_are_exact_on_whole_numbers(launch: Launcher, device: str) -> None:
    """Sums of small whole numbers are exact in any order; so are quarter turns."""
    generator = torch.Generator().manual_seed(11)
    q_THI = torch.randint(-9, 10, (65, 4, 128), generator=generator).bfloat16()
    quarter = torch.randint(0, 4, (65, 32), generator=generator)
    signs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    for name in INDEX_FORMATS:
        for interleaved, leading in ((True, False), (True, True), (False, True), (False, False)):
            case = IndexEncodeCase(name, 4, 128, 64, interleaved, leading)
            same(launch, device, "index.encode_queries", case, (q_THI, signs[quarter]))
        plain = IndexEncodeCase(name, 4)
        same(launch, device, "index.encode_queries", plain, (q_THI, None))


def activations_are_encoded_exactly(launch: Launcher, device: str) -> None:
    for group, scale, dtype in (
        (32, "e8m0", "float32"),
        (128, "fp32", "float32"),
        (32, "fp32", "bfloat16"),
    ):
        x_TI = odd_rows(640, group, getattr(torch, dtype))
        x_TI = readable(launch, x_TI) if dtype == "bfloat16" else x_TI
        case = QuantiseFp8Case(1, 640, group, scale, dtype=dtype)
        same(launch, device, "quantise.fp8", case, (x_TI.unsqueeze(1), None))


CHECKS = (
    latents_are_encoded_exactly,
    index_keys_and_queries_are_encoded_exactly,
    rotated_index_codes_are_exact_on_whole_numbers,
    activations_are_encoded_exactly,
)


def same(
    launch: Launcher, device: str, op: str, case: Any, arguments: tuple[torch.Tensor | None, ...]
) -> None:
    """The kernel's results, caches that it wrote included, are the reference's."""
    registry = Registry((*triton_backends(launch), *REFERENCE_BACKENDS))
    expected = run(registry, op, REFERENCE, case, _call(arguments, "cpu"))
    with Poisoned():
        results = run(registry, op, "triton", case, _call(arguments, device))
    for place, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        problem = _difference(ours.cpu(), theirs)
        assert not problem, f"{case}, result {place}: {problem}"


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """What is not the same byte for byte; any NaN is the same as another."""
    if ours.is_floating_point():
        if not torch.equal(ours.isnan(), theirs.isnan()):
            return "NaN in other places"
        ours, theirs = ours.nan_to_num(nan=0.0), theirs.nan_to_num(nan=0.0)
    if same_bytes(ours, theirs):
        return ""
    differ = (ours != theirs).nonzero()
    if not len(differ):
        return "other signs of zeros"
    place = tuple(differ[0].tolist())
    return f"{len(differ)} differ, first {place}: {ours[place]}, not {theirs[place]}"


def _call(arguments: tuple[torch.Tensor | None, ...], device: str) -> Call:
    """Copies that lie in memory as the arguments do."""
    return Call((), tuple(one if one is None else _copy(one, device) for one in arguments))


def _copy(one: torch.Tensor, device: str) -> torch.Tensor:
    whole = torch.empty(0, dtype=one.dtype).set_(one.untyped_storage()).clone().to(device)
    return whole.as_strided(one.shape, one.stride(), one.storage_offset())
