"""Rows that begin more than 2^31 numbers behind the start of their cache, in the interpreter, whose
integers overflow as a GPU's do: what is read, and written, is the same as where rows lie near.

The memory in front of the rows is never touched, so that the system need not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from metainfer.kernels.inputs import attention, cache, compress, index
from metainfer.kernels.inputs.base import Call, Draw
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton import attention_decode, prefill_entries, triton_backends
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.ops.attention import AttentionCase
from metainfer.ops.cache import CacheReadCase, CacheWriteCase
from metainfer.ops.compress import CompressCase
from metainfer.ops.index import IndexCase
from metainfer.ops.index_codes import IndexWriteCase
from tests.fakes.gluon_machine import GluonLauncher

REGISTRY = Registry(triton_backends(JitLauncher((9, 0), 4)))
BEYOND = 2**31  # numbers
DENSE = AttentionCase(2, 512, 8, ratio=4, topk=6)
BYTES = AttentionCase(2, 512, 8, 4, 6, window_format="v4_fp8", entry_format="v4_fp8")
PREFILL = AttentionCase(2, 512, 8, ratio=4, topk=6, entry_format="v4_fp8")
PREFILLS = partial(attention.sparse_prefill, rows=3, start=45)
DECODES = partial(attention.sparse_decode, rows=3)
WRITTEN = CacheWriteCase("v4_fp8", 512, 64, "rms")

# (op, case, what makes its inputs, {place of a cache: place of the lists of its rows})
FAR: dict[str, tuple[str, Any, Any, dict[int, int]]] = {
    "prefill, bf16": ("attention.sparse_prefill", DENSE, PREFILLS, {5: 6}),
    "prefill, bytes": ("attention.sparse_prefill", PREFILL, PREFILLS, {5: 6}),
    "decode, bf16": ("attention.sparse_decode", DENSE, DECODES, {4: 5}),
    "decode, bytes": ("attention.sparse_decode", BYTES, DECODES, {1: 2, 4: 5}),
    "index": (
        "attention.index_topk",
        IndexCase(8, 128, 8, key_format="index_fp8"),
        partial(index.index_topk, rows=4, start=71),
        {2: 3},
    ),
    "index of decode": (
        "attention.index_topk_decode",
        IndexCase(4, 128, 6, key_format="index_fp4"),
        partial(index.index_topk_decode, rows=3, entries=29),
        {2: 3},
    ),
    "write": ("cache.write", WRITTEN, partial(cache.write, rows=5), {3: 4}),
    "write, bf16": (
        "cache.write",
        CacheWriteCase("dense", 512, 64, "rms"),
        partial(cache.write, rows=5),
        {3: 4},
    ),
    "read": ("cache.read", CacheReadCase("v4_fp8"), partial(cache.read, rows=5), {0: 1}),
    "write of index keys": (
        "cache.write_index",
        IndexWriteCase("index_fp8"),
        partial(cache.write_index, rows=5),
        {4: 6, 5: 6},
    ),
    "compress": (
        "attention.compress_decode",
        CompressCase(4, 64, 32, overlap=True),
        partial(compress.compress_decode, entries=3),
        {0: 1},
    ),
}


def moved(near: Any, by: int) -> Any:
    """Rows of a cache behind `by` others, or of its codes and of its scales."""
    if isinstance(near, tuple):
        return tuple(moved(part, by) for part in near)
    try:
        far = near.new_empty(by + len(near), *near.shape[1:])
    except RuntimeError as error:
        pytest.skip(f"no room for so many addresses: {error}")
    far[by:] = near
    return far


def far_call(call: Call, lists_of: dict[int, int]) -> tuple[Call, int]:
    """The call with its caches far behind, and by how many rows."""
    arguments = list(call.arguments)
    caches = [arguments[place] for place in lists_of]
    by = BEYOND // max(part.shape[1] for one in caches for part in parts(one)) + 1
    for place in lists_of:
        arguments[place] = moved(arguments[place], by)
    for place in set(lists_of.values()):
        arguments[place] = torch.where(arguments[place] < 0, -1, arguments[place] + by)
    return Call(call.weights, tuple(arguments)), by


def check(name: str, run: Callable[..., Any]) -> None:
    _, case, make, lists_of = FAR[name]
    near = make(case, Draw(8))
    far, by = far_call(make(case, Draw(8)), lists_of)
    expected, actual = (run(case, *call.arguments) for call in (near, far))
    for place in lists_of:  # what was written
        expected = *parts(expected), *parts(near.arguments[place])
        actual = *parts(actual), *parts(far.arguments[place])
    for ours, theirs in zip(actual, expected, strict=True):
        kept = ours[by:] if len(ours) > by else ours
        assert torch.equal(bits(kept), bits(theirs))


@pytest.mark.parametrize("name", FAR)
def test_rows_far_behind(name: str) -> None:
    check(name, REGISTRY.backends(FAR[name][0])["triton"].run)


def test_bytes_that_are_not_decoded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_entries, "MOST_DECODED_BYTES", 0)
    check("prefill, bytes", REGISTRY.backends("attention.sparse_prefill")["triton"].run)


@pytest.mark.parametrize("name", ["decode, bf16", "decode, bytes"])
def test_kernels_in_gluon(name: str) -> None:
    check(name, partial(attention_decode.run, GluonLauncher((9, 0), 4)))


def parts(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)
