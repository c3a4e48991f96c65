"""Weights in the order of the kernel for sm_90, read as its threads read them."""

from __future__ import annotations

import torch

from metainfer.kernels.cuda.experts_fp4 import Pieces, pieces
from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.reference.formats import decode_e4m3

LOW, HIGH = 0x6C686000, 0x7C787470


def selected(low: int, high: int, selectors: int) -> int:
    """PRMT: four bytes of eight, by the low three bits of four nibbles."""
    source = (high << 32 | low).to_bytes(8, "little")
    return int.from_bytes([source[selectors >> 4 * i & 7] for i in range(4)], "little")


def unpacked(word: int, shift: int) -> tuple[int, int]:
    """`unpack` of experts_fp4.cu."""
    low = LOW - shift * 0x08080800 & 0xFFFFFFFF
    high = HIGH - shift * 0x08080808 & 0xFFFFFFFF
    first = selected(low, high, word & 0x7777) | word & 0x80808080
    second = selected(low, high, word >> 16 & 0x7777) | word << 4 & 0x80808080
    return first, second


def read(made: Pieces, expert: int, block: int, step: int) -> torch.Tensor:
    """fp32 [128, 128]: what the two warpgroups multiply with, times the factors."""
    codes = torch.zeros(128, 128, dtype=torch.uint8)
    for group in range(2):
        tile = made.codes[expert, block, step, group]
        words = tile[:4096].view(torch.int32).view(2, 128, 4)
        shifts = tile[4096:].view(64, 4)
        for thread in range(128):
            row0 = 16 * (thread // 32) + thread % 32 // 4
            for i in range(4):  # 32 columns each
                for high in range(2):  # the row, and the one eight further
                    row = row0 + 8 * high
                    word = int(words[i // 2, thread, 2 * (i % 2) + high]) & 0xFFFFFFFF
                    pair = unpacked(word, int(shifts[row, i]))
                    for half, four in enumerate(pair):
                        column = 32 * i + 16 * half + 4 * (thread % 4)
                        numbers = torch.tensor(list(four.to_bytes(4, "little")), dtype=torch.uint8)
                        codes[64 * group + row, column : column + 4] = numbers
    return decode_e4m3(codes) * made.factors[expert, block].unsqueeze(1)


def random_matrix(rows: int, columns: int, spread: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    packed = torch.randint(0, 256, (2, rows, columns // 2), generator=generator)
    scales = torch.randint(120 - spread, 121, (2, rows, columns // 32), generator=generator)
    return packed.to(torch.uint8), scales.to(torch.uint8)


def test_one_matrix_is_read_back_exactly() -> None:
    weight = random_matrix(256, 256, 11)
    made, numbers = pieces(weight), to_float("fp4_group", weight, (1, 32))
    whole = numbers.view(2, 2, 128, 2, 128)
    for block, step in ((0, 0), (1, 1)):
        assert torch.equal(read(made, 1, block, step), whole[1, block, :, step])
    assert made.codes.nbytes == sum(tensor.nbytes for tensor in weight)


def test_rows_of_gate_and_up_take_turns_by_eight() -> None:
    gate, up = random_matrix(128, 128, 3), random_matrix(128, 128, 4)
    made = pieces(gate, up)
    numbers = [to_float("fp4_group", weight, (1, 32)) for weight in (gate, up)]
    turns = torch.stack([x[0].view(16, 8, 128) for x in numbers], dim=1).reshape(256, 128)
    for block in range(2):
        found = read(made, 0, block, 0)
        assert torch.equal(found, turns[128 * block : 128 * block + 128])
