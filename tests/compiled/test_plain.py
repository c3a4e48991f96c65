"""The plain kernels of sparse attention fit the smallest shared memory, whatever their keys are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.compare import run
from metainfer.kernels.inputs.base import Call, Draw
from metainfer.kernels.inputs.load import at_load
from metainfer.kernels.triton import prefill_entries
from metainfer.kernels.triton.compile_all import compile_all
from metainfer.kernels.triton.launch import shared_limit
from metainfer.kernels.triton.machine_code import MachineCode
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.attention import AttentionCase
from metainfer.ops.base import Load
from metainfer.ops.targets import CARD_KINDS

KIND = CARD_KINDS["sm_89"]
WINDOWED = AttentionCase(64, 512, 128, ratio=4, topk=512)
ABSORBED = AttentionCase(64, 512, 0, ratio=1, topk=512, rope_extra=64, sink=False)
PREFILL, DECODE = "attention.sparse_prefill", "attention.sparse_decode"
RING, ENTRIES = 1, 4  # places among the arguments of sparse decode
ROUNDS: dict[str, tuple[str, AttentionCase, dict[int, str]]] = {
    "prefill, fp32 entries": (PREFILL, WINDOWED, {5: "float32"}),
    "prefill, few heads": (PREFILL, replace(WINDOWED, heads=3), {5: "float32"}),
    "prefill, absorbed": (PREFILL, ABSORBED, {5: "float32"}),
    "prefill, rows apart": (PREFILL, ABSORBED, {5: "apart"}),
    "prefill, fp32": (PREFILL, replace(WINDOWED, dtype="float32"), {}),
    "prefill, v4_fp8": (PREFILL, replace(WINDOWED, entry_format="v4_fp8"), {}),
    "prefill, v41_fp4": (PREFILL, replace(WINDOWED, entry_format="v41_fp4"), {}),
    "prefill, mla_fp8": (PREFILL, replace(ABSORBED, entry_format="mla_fp8"), {}),
    "decode, fp32 caches": (DECODE, WINDOWED, {RING: "float32", ENTRIES: "float32"}),
    "decode, fp32 ring, codes": (
        DECODE,
        replace(WINDOWED, entry_format="v4_fp8"),
        {RING: "float32"},
    ),
    "decode, absorbed": (DECODE, ABSORBED, {ENTRIES: "float32"}),
    "decode, rows apart": (DECODE, ABSORBED, {ENTRIES: "apart"}),
}


def recorded(op: str, case: AttentionCase, changed: dict[int, str]) -> Any:
    """The plain kernel that a call launches, some of whose arguments are kept otherwise."""
    launch = RecordingLauncher(KIND.capability, KIND.multiprocessors)
    arguments = list(at_load(op, case, Load(64, 8192), Draw(0, "meta")).arguments)
    for place, kept in changed.items():
        rows = arguments[place]
        if kept == "float32":
            arguments[place] = rows.float()
        else:
            arguments[place] = rows.new_empty(len(rows), rows.shape[1] + 1)[:, :-1]
    run(builtin_registry(launch), op, "triton", case, Call((), tuple(arguments)))
    (unit,) = [unit for unit in launch.units() if unit.name.endswith("_plain")]
    return unit


@pytest.fixture(scope="module")
def facts() -> dict[str, MachineCode | str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_entries, "MOST_DECODED_BYTES", 0)
        units = {name: recorded(*one) for name, one in ROUNDS.items()}
    done = compile_all([(unit, KIND.capability) for unit in units.values()], 1)
    return {name: done[unit, KIND.capability] for name, unit in units.items()}


@pytest.mark.parametrize("name", ROUNDS)
def test_tiles_fit(facts: dict[str, MachineCode | str], name: str) -> None:
    code = facts[name]
    assert isinstance(code, MachineCode), code
    assert code.shared_bytes <= shared_limit(KIND.capability)


def test_values_that_do_not_fit_are_refused() -> None:
    launch = RecordingLauncher(KIND.capability, KIND.multiprocessors)
    backend = builtin_registry(launch).backends(PREFILL)["triton"]
    verdict = backend.eligible(replace(WINDOWED, width=1024), KIND.target)
    assert verdict.reason == "holds values of 512 channels at most, not of 1024"
