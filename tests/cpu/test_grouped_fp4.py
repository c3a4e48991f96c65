"""Weights and rows in the order of the kernel for sm_90, read as its threads read them."""

from __future__ import annotations

import pytest
import torch

from metainfer.kernels.cuda.grouped_fp4 import Pieces, height_of, pieces, stages_of
from metainfer.kernels.reference.dequantise import to_float
from metainfer.kernels.reference.formats import decode_e4m3
from metainfer.kernels.triton.launch import JitLauncher, shared_limit
from metainfer.kernels.triton.moe_order import order
from metainfer.kernels.triton.moe_records import record_words, records
from metainfer.ops.catalogue import OPS

LAUNCH = JitLauncher((9, 0), 132)
LOW, HIGH = 0x6C686000, 0x7C787470


def selected(low: int, high: int, selectors: int) -> int:
    """PRMT: four bytes of eight, by four nibbles."""
    source = (high << 32 | low).to_bytes(8, "little")
    nibbles = [selectors >> 4 * i & 15 for i in range(4)]
    assert max(nibbles) < 8  # what is higher would ask for copies of a sign
    return int.from_bytes([source[nibble] for nibble in nibbles], "little")


def unpacked(word: int, shift: int) -> tuple[int, int]:
    """`Table` of grouped_fp4.cuh."""
    low = LOW - shift * 0x08080800 & 0xFFFFFFFF
    high = HIGH - shift * 0x08080808 & 0xFFFFFFFF
    magnitudes = word & 0x77777777
    first = selected(low, high, magnitudes) | word & 0x80808080
    second = selected(low, high, magnitudes >> 16) | word << 4 & 0x80808080
    return first, second


def first_operand(made: Pieces, expert: int, block: int, step: int) -> torch.Tensor:
    """fp32 [128, 128]: the registers of the two warpgroups, by row and by place in the sum of a
    step's products, times the factors."""
    codes = torch.zeros(128, 128, dtype=torch.uint8)
    for group in range(2):
        half = made.codes[expert, block, step, group]
        words = half[:4096].view(torch.int32).view(2, 128, 4)
        shifts = half[4096:].view(128, 2)
        for thread in range(128):
            row0 = 16 * (thread // 32) + thread % 32 // 4
            for i in range(4):  # products of 32
                for high in range(2):  # the row, and the one eight further
                    word = int(words[i // 2, thread, 2 * (i % 2) + high]) & 0xFFFFFFFF
                    pair = unpacked(word, int(shifts[thread, high]))
                    for half_of_32, four in enumerate(pair):
                        place = 32 * i + 16 * half_of_32 + 4 * (thread % 4)
                        numbers = torch.tensor(list(four.to_bytes(4, "little")), dtype=torch.uint8)
                        codes[64 * group + row0 + 8 * high, place : place + 4] = numbers
    return decode_e4m3(codes) * made.factors[expert, block].unsqueeze(1)


def second_operand(record: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a record [BM, 128] by place in the sum, unswizzled, and scales [BM]."""
    codes = record[: 32 * height].view(torch.uint8).view(height, 8, 16)
    piece = torch.arange(8)[None, :] ^ torch.arange(height)[:, None] % 8
    codes = codes.gather(1, piece[:, :, None].expand(-1, -1, 16)).reshape(height, 128)
    # Four scales for threads of each quad and two columns j of eight sums: 8 j + 2 quad + {0, 1}.
    fours = record[32 * height :].view(torch.float32).view(height // 16, 4, 2, 2)
    return codes, fours.transpose(1, 2).reshape(height)


def random_matrix(rows: int, columns: int, spread: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    packed = torch.randint(0, 256, (2, rows, columns // 2), generator=generator)
    scales = torch.randint(120 - spread, 121, (2, rows, columns // 32), generator=generator)
    return packed.to(torch.uint8), scales.to(torch.uint8)


def place_of_columns() -> torch.Tensor:
    """Where the columns of a step are in the sums: words 8 c + p are word c of piece p."""
    column = torch.arange(128)
    word = column // 4
    return 16 * (word % 8) + 4 * (word // 8) + column % 4


def test_one_matrix_is_read_back_exactly() -> None:
    weight = random_matrix(256, 256, 11)
    made, numbers = pieces(weight), to_float("fp4_group", weight, (1, 32))
    whole = numbers.view(2, 2, 128, 2, 128)
    for block, step in ((0, 0), (1, 1)):
        found = first_operand(made, 1, block, step)[:, place_of_columns()]
        assert torch.equal(found, whole[1, block, :, step])
    assert made.codes.nbytes == sum(tensor.nbytes for tensor in weight)


def test_rows_of_gate_and_up_take_turns_by_eight() -> None:
    gate, up = random_matrix(128, 128, 3), random_matrix(128, 128, 4)
    made = pieces(gate, up)
    numbers = [to_float("fp4_group", weight, (1, 32)) for weight in (gate, up)]
    turns = torch.stack([x[0].view(16, 8, 128) for x in numbers], dim=1).reshape(256, 128)
    for block in range(2):
        found = first_operand(made, 0, block, 0)[:, place_of_columns()]
        assert torch.equal(found, turns[128 * block : 128 * block + 128])


@pytest.mark.parametrize("height", [64, 128])
def test_records_meet_weights(height: int) -> None:
    """Products of a step as matrix instructions see both operands, of all slots of all tiles."""
    experts, chosen, rows = 2, 2, 70
    generator = torch.Generator().manual_seed(height)
    codes = torch.randint(0, 0x7F, (rows, 256 + 16), generator=generator).to(torch.uint8)[:, :256]
    scales = torch.randint(1, 254, (rows, 2), generator=generator).to(torch.uint8)
    ids = torch.rand(rows, experts, generator=generator).argsort(1)[:, :chosen]
    ids[3:9, 0] = -1
    weight = random_matrix(128, 256, 5)
    made, numbers = pieces(weight), to_float("fp4_group", weight, (1, 32))
    placed = order(LAUNCH, ids, experts, height)
    found = records(LAUNCH, codes, scales, placed, chosen, height)
    assert found.shape == (placed.tiles, 2, record_words(height))
    assert placed.slots is not None
    decoded, seen = decode_e4m3(codes).double(), 0
    for tile in range(placed.tiles):
        slots = [int(slot) for slot in placed.slots[tile] if slot >= 0]
        seen += len(slots)
        row = torch.tensor([slot // chosen for slot in slots], dtype=torch.int64)
        expert = int(placed.experts[tile])
        for step in range(2) if slots else ():
            here = slice(128 * step, 128 * step + 128)
            codes_NK, scale_N = second_operand(found[tile, step], height)
            first = first_operand(made, expert, 0, step).double()
            products = first @ decode_e4m3(codes_NK).double().T[:, : len(slots)]
            wanted = numbers[expert, :, here].double() @ decoded[row, here].T
            assert torch.equal(products, wanted)
            powers = 2.0 ** (scales[row, step].double() - 127)
            assert torch.equal(scale_N[: len(slots)].double(), powers)
    assert seen == int((ids >= 0).sum())


def test_records_that_the_kernel_writes_are_read_alike() -> None:
    """word_place and scale_place of grouped_fp4.cuh."""
    height = 64
    codes = torch.randint(0, 256, (height, 128)).to(torch.uint8)
    scales = torch.rand(height)
    record = torch.empty(record_words(height), dtype=torch.int32)
    for n in range(height):
        for word, code in enumerate(codes[n].view(torch.int32)):
            record[(n * 128 + (word % 8 ^ n % 8) * 16 + 4 * (word // 8)) // 4] = code
        at = (n & ~15) + 4 * (n >> 1 & 3) + 2 * (n >> 3 & 1) + (n & 1)
        record[32 * height + at] = scales[n].view(torch.int32)
    found, found_scales = second_operand(record, height)
    assert torch.equal(found[:, place_of_columns()], codes)
    assert torch.equal(found_scales, scales)


def test_stages_fit() -> None:
    case = OPS["moe.experts_fp8_rows"].cases["deepseek-v4-flash"][0]
    limit = shared_limit((9, 0))
    heights = {height_of(case, rows): 1 + (rows <= 256) for rows in (1, 256, 2048, 8192)}
    assert sorted(heights) == [16, 64, 128]
    for height, blocks in heights.items():
        for columns in (case.width, case.inner):
            stages, shared = stages_of(columns, height, limit)
            assert stages >= 4 and blocks * (shared + 1024) <= limit + 1024
