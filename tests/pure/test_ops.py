"""What operations cost at least: laws that hold for every case, and figures of some."""

from __future__ import annotations

from typing import Any

import pytest

from metainfer.ops.base import Cost, Load
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
    assert many.flops == pytest.approx(64 * one.flops)
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
