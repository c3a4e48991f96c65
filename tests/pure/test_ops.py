"""What operations cost at least: laws that hold for every case, and figures of some."""

from __future__ import annotations

from typing import Any

import pytest

from metainfer.ops.base import Cost, Load, seen_in_all
from metainfer.ops.catalogue import OPS
from metainfer.ops.linear import DenseCase, Fp8BlockCase

CASES = [
    pytest.param(op, case, id=f"{name}-{number}")
    for name, op in OPS.items()
    for number, case in enumerate((*(c for cases in op.cases.values() for c in cases),))
]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_work_grows_with_rows_and_never_shrinks_with_tokens(op: Any, case: Any) -> None:
    one, many = (op.cost(case, Load(rows, 4096)) for rows in (1, 64))
    assert one.flops > 0 and one.bytes > 0
    # The earlier rows of a prompt see a little less than the last.
    assert many.flops == pytest.approx(64 * one.flops, rel=0.03)
    assert one.bytes < many.bytes <= 64 * one.bytes
    longer = op.cost(case, Load(1, 32768))
    assert longer.flops >= one.flops
    assert longer.bytes >= one.bytes


def test_a_product_reads_its_weight_once_however_many_rows_there_are() -> None:
    dense = DenseCase(4096, 1024, "bfloat16", "float32")
    cost = OPS["linear.dense"].cost
    assert cost(dense, Load(3)).flops == 2 * 3 * 4096 * 1024
    rows = cost(dense, Load(2)).bytes - cost(dense, Load(1)).bytes
    assert rows == 1024 * 2 + 4096 * 4
    assert cost(dense, Load(1)).bytes - rows == 4096 * 1024 * 2


def test_fp8_weights_are_a_byte_each() -> None:
    cost: Cost = OPS["linear.fp8_block"].cost(Fp8BlockCase(4096, 2048), Load(1))
    assert cost.bytes == 4096 * 2048 + (4096 + 2048) * 2


def test_experts_are_read_until_all_are() -> None:
    op = OPS["moe.experts"]
    (case, *_) = op.cases["deepseek-v4-flash"]
    per_row = [op.cost(case, Load(rows)).bytes / rows for rows in (1, 2, 512)]
    assert per_row[0] == pytest.approx(per_row[1], rel=0.01)
    assert per_row[2] < 0.2 * per_row[0]


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
@pytest.mark.parametrize("most", [None, 1, 3, 128])
def test_entries_seen_are_counted_row_by_row(ratio: int, most: int | None) -> None:
    for rows, tokens in ((0, 0), (1, 1), (5, 5), (7, 300), (300, 300), (513, 640)):
        seen = [(position + 1) // ratio for position in range(tokens - rows, tokens)]
        expected = sum(seen if most is None else (min(entries, most) for entries in seen))
        assert seen_in_all(Load(rows, tokens), ratio, most) == expected


def test_floors_count_what_must_be_read() -> None:
    """By hand: bytes of caches as they are kept, lists, and what a row sees of a prompt."""
    decode = OPS["attention.sparse_decode"]
    (case,) = {
        c
        for c in decode.cases["deepseek-v4-flash"]
        if (c.topk, c.window_format, c.entry_format) == (512, "v4_fp8", "v4_fp8")
    }
    cost = decode.cost(case, Load(3, 32768))
    keys = 128 + 512
    assert cost.bytes == 3 * (keys * (592 + 8) + 2 * 64 * 512 * 2)
    assert cost.flops == 3 * 64 * keys * 2 * (512 + 512)

    prefill = OPS["attention.sparse_prefill"]
    (mla,) = {c for c in prefill.cases["glm-5.3"] if c.entry_format == "mla_fp8"}
    cost = prefill.cost(mla, Load(4096, 4096))
    seen = sum(min(n, 2048) for n in range(1, 4097))
    assert cost.flops == 64 * seen * 2 * (576 + 512)
    assert cost.bytes == 4096 * (656 + 8 * 2048 + 64 * (576 + 512) * 2)

    index = OPS["attention.index_topk_decode"]
    fp4 = next(c for c in index.cases["deepseek-v4-flash"] if c.key_format == "index_fp4")
    cost = index.cost(fp4, Load(2, 32768))
    assert cost.bytes == 2 * (8192 * (64 + 4 + 8) + 64 * (64 + 4 + 4) + 8 * 512)

    closing = OPS["attention.compress_decode"]
    overlapping = closing.cases["deepseek-v4-flash"][0]
    cost = closing.cost(overlapping, Load(1))
    assert cost.bytes == 8 * 2 * 512 * 4 + 512 * 2 + 64 * 4
