"""Prefill over coded entries that do not fit when decoded says once that it is slower."""

from __future__ import annotations

from typing import Any

import pytest

from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.load import at_load
from metainfer.kernels.triton import attention_prefill, prefill_entries
from metainfer.ops.attention import AttentionCase
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS

OP = "attention.sparse_prefill"


class Launcher:
    """Starts nothing, and notes what it was asked for."""

    capability, multiprocessors, interpreted, portable = (9, 0), 132, False, False

    def __init__(self) -> None:
        self.started: list[str] = []

    def __call__(self, kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        self.started.append(kernel.fn.__name__)


def coded_case() -> AttentionCase:
    tile_of = attention_prefill.tile_of
    return next(
        case
        for cases in OPS[OP].cases.values()
        for case in cases
        if case.entry_format != "dense" and tile_of(case, (9, 0)).kernel == "pairs"
    )


@pytest.mark.parametrize(("most", "told"), [(0, 1), (2**30, 0)])
def test_entries_too_many_to_decode_are_told_once(
    most: int, told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefill_entries, "MOST_DECODED_BYTES", most)
    attention_prefill._say_too_many.cache_clear()
    case, launch = coded_case(), Launcher()
    call = at_load(OP, case, Load(4, 512), Draw(0, "cpu"))
    for _ in range(2):
        attention_prefill.run(launch, case, *call.arguments)
    assert ("prefill_plain" in launch.started) is bool(told)
    assert sum("plain kernel" in record.message for record in caplog.records) == told
