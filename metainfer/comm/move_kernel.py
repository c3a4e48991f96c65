"""Bytes moved by a kernel: its stores go into another GPU's memory, or its loads come from there,
as the addresses say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton.launch import Launcher, cdiv

_BLOCK_WORDS = 4096
_WARPS = 8
_PROGRAMS_PER_MULTIPROCESSOR = 2


@dataclass(frozen=True, slots=True)
class Address:
    """A place in memory that this GPU reaches, in the form of a tensor of int32 for kernels."""

    number: int
    dtype: torch.dtype = torch.int32

    def data_ptr(self) -> int:
        return self.number


@triton.jit
def move_words(source, target, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy int32 [words] from `source` to `target`; programs take turns at blocks."""
    step = tl.num_programs(0) * BLOCK
    for begin in range(tl.program_id(0) * BLOCK, words, step):
        places = begin + tl.arange(0, BLOCK)
        inside = places < words
        tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


def start_move(
    launch: Launcher,
    target: Address | torch.Tensor,
    source: Address | torch.Tensor,
    size: int,
    at_same_time: int = 1,
) -> None:
    """Start copying `size` bytes, a multiple of 64, between addresses that are multiples of 16.

    Args:
        target, source: int32.
        at_same_time: kernels that share this GPU.
    """
    words = size // 4
    most = max(1, _PROGRAMS_PER_MULTIPROCESSOR * launch.multiprocessors // at_same_time)
    grid = (min(cdiv(words, _BLOCK_WORDS), most),)
    launch(
        move_words,
        grid,
        source,
        target,
        words,
        num_warps=_WARPS,
        BLOCK=_BLOCK_WORDS,
    )
