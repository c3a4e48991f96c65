"""Pieces of PTX as kernels have them inline, on tensors of 32-bit words."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch


def signed(words: torch.Tensor) -> torch.Tensor:
    """int64 below 2^32 -> the same 32 bits as int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _halves(words: torch.Tensor) -> torch.Tensor:
    """The two bf16 of each word, in a last dimension."""
    return signed(words).unsqueeze(-1).contiguous().view(torch.bfloat16)


def _permuted(one: torch.Tensor, other: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    both = one | (other << 32)  # int64: the top byte's sign is masked off below
    result = torch.zeros_like(one)
    for place in range(4):
        choice = (selector >> (4 * place)) & 15
        byte = (both >> (8 * (choice & 7))) & 0xFF
        byte = torch.where(choice >= 8, torch.where(byte >= 128, 255, 0), byte)
        result |= byte << (8 * place)
    return result


def _fused(one: torch.Tensor, other: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    numbers = _halves(one).double() * _halves(other).double() + _halves(added).double()
    words = numbers.bfloat16().contiguous().view(torch.int32).squeeze(-1)
    return words.to(torch.int64) & 0xFFFFFFFF


def _by_table(*operands: torch.Tensor) -> torch.Tensor:
    """Bit by bit what the entry of a table says that three bits choose."""
    *sources, table = operands
    result = torch.zeros_like(table)
    for entry in range(8):
        chosen = torch.full_like(table, 0xFFFFFFFF)
        for place, source in enumerate(sources):
            chosen &= source if entry >> (2 - place) & 1 else source ^ 0xFFFFFFFF
        result |= torch.where(table >> entry & 1 == 1, chosen, 0)
    return result


_INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda one: one,
    "and.b32": lambda one, other: one & other,
    "or.b32": lambda one, other: one | other,
    "add.u32": lambda one, other: (one + other) & 0xFFFFFFFF,
    "lop3.b32": _by_table,
    "shl.b32": lambda one, by: (one << by) & 0xFFFFFFFF,
    "shr.u32": lambda one, by: one >> by,
    "prmt.b32": _permuted,
    "fma.rn.bf16x2": _fused,
}


def assembly(text: str, outputs: int, words: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a piece of PTX on int64 tensors of 32-bit words."""
    registers = {f"${outputs + place}": word for place, word in enumerate(words)}
    for line in re.sub(r"[{}]", "", text).split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in rest.split(","))
        values = [
            registers[source] if source in registers else torch.full_like(words[0], int(source, 0))
            for source in sources
        ]
        registers[target] = _INSTRUCTIONS[name](*values)
    return [registers[f"${place}"] for place in range(outputs)]
