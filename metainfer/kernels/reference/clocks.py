"""Exponential clocks from Philox4x32-10, as `sample.draw` defines them.

Words of 32 bits are kept in int64. Shape suffixes: N keys, C clocks.
"""

from __future__ import annotations

from typing import Any

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_FEW = 1 / 16
"""Below this the logarithm is taken as its series: 1 - v would have lost what v says."""

Words = tuple[Any, Any, Any, Any]
"""Four tensors, or four arrays of numpy, of int64."""


def philox(counters: Words, key: tuple[Any, Any]) -> Words:
    """Four random words for each counter of four words and key of two; shapes are broadcast.

    Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    a, b, c, d = counters
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        high_a, low_a = _product(_MULTIPLIERS[0], a)
        high_c, low_c = _product(_MULTIPLIERS[1], c)
        a, b, c, d = high_c ^ b ^ key_0, low_c, high_a ^ d ^ key_1, low_a
        key_0, key_1 = (key_0 + _STEPS[0]) & _MASK, (key_1 + _STEPS[1]) & _MASK
    return a, b, c, d


def _product(number: int, words: Any) -> tuple[Any, Any]:
    """(high, low) words of the products; those of 64 bits wrap around, which keeps their bits."""
    product = words * number
    return (product >> 32) & _MASK, product & _MASK


def clocks(seeds_N: torch.Tensor, positions_N: torch.Tensor, count: int) -> torch.Tensor:
    """fp32 [N, count], E[0] .. E[count - 1] of each row; seeds and positions are int64 [N]."""
    blocks_C = torch.arange(-(-count // 4), device=seeds_N.device)
    words = words_of(blocks_C, seeds_N[:, None], positions_N[:, None])
    return times_of(torch.stack(words, dim=-1).flatten(1)[:, :count])


def words_of(blocks_C: Any, seed_N1: Any, position_N1: Any) -> Words:
    """The words of clocks 4 c to 4 c + 3 for each block c, one [N, C] for each of the four."""
    counters = (blocks_C, blocks_C * 0, position_N1 & _MASK, (position_N1 >> 32) & _MASK)
    return philox(counters, (seed_N1 & _MASK, (seed_N1 >> 32) & _MASK))


def times_of(words: torch.Tensor) -> torch.Tensor:
    """Words as times that are exponentially distributed."""
    v = (words.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp_max(1.0 - 2.0**-24)
    series = v / 6 + 0.2
    for divisor in (4, 3, 2, 1):
        series = series * v + 1 / divisor
    return torch.where(v < _FEW, series * v, -(1.0 - v).log())
