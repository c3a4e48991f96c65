"""Payloads of which every word tells where it is from: pair, place and round.

A word that is missing, stale, of another pair or at another place is seen, and so is one written
behind the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

WORD_BYTES = 4
GUARD_BYTES = 256
"""Behind each payload lies so much that nobody may write to."""

_POISON = -0x5A5A5A5B
_CHUNK_WORDS = 2**22  # what is computed at a time, so that checking takes little memory
_MOST_PAIRS = 64


def fill(payload: torch.Tensor, source: int, target: int, number: int) -> None:
    """Write what `source` sends to `target` in round `number`.

    Args:
        payload: int32 [words].
    """
    for begin, chunk in _chunks(payload):
        chunk.copy_(_words(begin, chunk, source, target, number))


def poison(slot: torch.Tensor) -> None:
    """Write what no payload has.

    Args:
        slot: int32 [words], the guard behind the payload included.
    """
    slot.fill_(_POISON)


def problem(slot: torch.Tensor, words: int, source: int, target: int, number: int) -> str:
    """What is wrong with what arrived, in a few words; "" for nothing.

    Args:
        slot: int32 [words and guard].
    """
    wrong, first, seen = 0, -1, 0
    for begin, chunk in _chunks(slot[:words]):
        differs = chunk != _words(begin, chunk, source, target, number)
        count = int(differs.sum())
        if count and first < 0:
            place = int(differs.to(torch.uint8).argmax())
            first, seen = begin + place, int(chunk[place])
        wrong += count
    if wrong:
        return (
            f"{wrong} of {words} words from {source} to {target} are wrong, from byte"
            f" {first * WORD_BYTES} on: {_origin(slot, first, seen, source, target, number)}"
        )
    if bool((slot[words:] != _POISON).any()):
        return f"what {source} sent to {target} was written behind its end"
    return ""


def _origin(
    slot: torch.Tensor, first: int, seen: int, source: int, target: int, number: int
) -> str:
    """What a wrong word is."""
    if seen == _POISON:
        return "nothing arrived"
    one = slot[first : first + 1]
    for older in range(max(0, number - 4), number):
        if int(_words(first, one, source, target, older)) == seen:
            return "they are of an earlier round"
    for other in range(_MOST_PAIRS):
        if int(_words(first, one, other, target, number)) == seen:
            return f"they are of {other}"
    return "they were never sent"


def _chunks(words: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for begin in range(0, len(words), _CHUNK_WORDS):
        yield begin, words[begin : begin + _CHUNK_WORDS]


def _words(begin: int, like: torch.Tensor, source: int, target: int, number: int) -> torch.Tensor:
    """int32, as many as `like` has, from word `begin` on; products wrap around."""
    key = (source * 0x3D4D51CB + target * 0x2545F491 + number * 0x1B873593 + 1) % 2**31
    words = torch.arange(begin, begin + len(like), dtype=torch.int32, device=like.device)
    words.mul_(0x1E3779B1).add_(key)
    words.bitwise_xor_(words >> 15)
    words.mul_(0x05EBCA6B)
    return words.bitwise_xor_(words >> 13)


def small_numbers(count: int, rank: int, number: int, device: str) -> torch.Tensor:
    """bf16 [count] of 0 to 7, whose sums over ranks bf16 holds exactly."""
    words = _words(0, torch.empty(count, dtype=torch.int32, device=device), rank, 0, number)
    return (words & 7).to(torch.bfloat16)
