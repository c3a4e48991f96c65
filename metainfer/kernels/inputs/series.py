"""Calls of one operation with different inputs, for timing it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from metainfer.kernels.compare import tensors
from metainfer.kernels.inputs.base import Call, Draw
from metainfer.kernels.inputs.load import at_load
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS

_MOST_BYTES = 4 * 2**30
_CACHE_BYTES: Mapping[str, int] = MappingProxyType({"cuda": 256 * 2**20, "cpu": 32 * 2**20})
"""What a series touches at least, so that each call finds its inputs in memory, not in a cache."""


def draw_one(op: str, case: Any, load: Load, device: str, seed: int, cache_dtype: str = "") -> Call:
    """The inputs of one call; the same numbers for the same seed on the same kind of device.

    Args:
        cache_dtype: as of `Draw`.
    """
    number = zlib.crc32(f"{seed} {op} {case} {load}".encode())
    return at_load(op, case, load, Draw(number, device, device == "cuda", cache_dtype))


def draw_series(
    op: str,
    case: Any,
    load: Load,
    device: str,
    seed: int,
    most: int = 16,
    cache_dtype: str = "",
) -> list[Call]:
    """As many different calls as a series needs, at most `most` and what 4 GiB hold."""
    moved = OPS[op].cost(case, load).bytes
    calls = [draw_one(op, case, load, device, seed, cache_dtype)]
    held = sum(tensor.nbytes for tensor in tensors((calls[0].weights, calls[0].arguments)))
    wanted = min(most, int(_CACHE_BYTES[device] // max(moved, 1)) + 1, _MOST_BYTES // max(held, 1))
    calls += [draw_one(op, case, load, device, seed + n, cache_dtype) for n in range(1, wanted)]
    return calls
