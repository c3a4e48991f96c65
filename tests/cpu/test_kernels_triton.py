"""Every Triton backend in the interpreter against the reference, at every small case and variant of
inputs, as code for a GPU with e4m3 and for one without; tests/gpu does the same on a GPU.

Sparse prefill starts one program for each row and some heads, which is slow over keys of 512
channels: what repeats programs is left to tests/gpu.
"""

from __future__ import annotations

from typing import Any

import pytest

from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton import DECLARED, triton_backends
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.ops.attention import DENSE
from metainfer.ops.base import Target
from metainfer.ops.catalogue import OPS
from tests.fakes.op_checks import check
from tests.fakes.op_inputs import VARIANTS

CAPABILITIES = ((8, 0), (9, 0))
REGISTRIES = {
    capability: Registry((*triton_backends(JitLauncher(capability, 4)), *REFERENCE_BACKENDS))
    for capability in CAPABILITIES
}
PREFILL = "attention.sparse_prefill"
MANY_ROWS = ("67 rows", "many entries")
WIDE = 512
MANY_HEADS = 64
FEW = ("0 rows", "1 rows", "late, all entries", "long halo")


def leaves_out(op: str, case: Any, variant: str, capability: tuple[int, int]) -> bool:
    """Whether a variant would only repeat what programs of others do: more rows, the further heads
    of a row, the same numbers once bytes are decoded."""
    if op.startswith("moe.experts") and variant in MANY_ROWS:
        return True  # test_kernels_triton_moe.py has them
    if op != PREFILL:
        return False
    few = case.width >= WIDE and (case.heads >= MANY_HEADS or capability != CAPABILITIES[0])
    return variant in MANY_ROWS or (few and variant not in FEW)


def marks_of(op: str, number: int, capability: tuple[int, int]) -> tuple[Any, ...]:
    """Experts whose codes are decoded by integers take longest: one case is for the soak."""
    late = op == "moe.experts_fp8_rows" and number == 0 and capability == (8, 0)
    return (pytest.mark.soak,) if late else ()


def capabilities_of(op: str, case: Any) -> tuple[tuple[int, int], ...]:
    """One where the code of all is the same: nothing is in bytes whose type is asked for."""
    if op.startswith("moe.") and op != "moe.experts_fp8_rows":
        return CAPABILITIES[:1]
    return CAPABILITIES[:1] if op == PREFILL and case.entry_format == DENSE else CAPABILITIES


ROUNDS = [
    pytest.param(
        declared.op, declared.name, case, capability,
        id=f"{declared.op}-{n}-{capability}", marks=marks_of(declared.op, n, capability),
    )
    for declared in DECLARED
    for n, case in enumerate(OPS[declared.op].small_cases)
    for capability in capabilities_of(declared.op, case)
]  # fmt: skip


@pytest.mark.parametrize(("op", "backend", "case", "capability"), ROUNDS)
def test_backend_fulfils_the_contract(
    op: str, backend: str, case: object, capability: tuple[int, int]
) -> None:
    registry = REGISTRIES[capability]
    verdict = registry.backends(op)[backend].eligible(case, Target("cuda", capability))
    if not verdict:
        pytest.skip(verdict.reason)
    for variant in VARIANTS[op]:
        if leaves_out(op, case, variant, capability):
            continue
        try:
            check(registry, op, backend, case, variant)
        except Exception as error:
            error.add_note(f"{op} on {backend}, {variant}: {case}")
            raise
