"""The cases that `pytest tests/gpu --one-case` runs start every kernel that there is."""

from __future__ import annotations

from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.ops.catalogue import OPS
from metainfer.ops.targets import CARD_KINDS
from tests.fakes.one_case import kernels_of, one_of_each

KIND = CARD_KINDS["sm_90"]


def test_every_kernel_has_a_case() -> None:
    launch = RecordingLauncher(KIND.capability, KIND.multiprocessors)
    registry = builtin_registry(launch)
    backends = [(op, backend) for op in OPS for backend in ("cuda", "triton")]
    for op, backend in backends:
        if backend not in registry.backends(op):
            continue
        chosen = one_of_each(registry, launch, op, backend, KIND.target)
        cases = OPS[op].small_cases
        served = [c for c in cases if registry.backends(op)[backend].eligible(c, KIND.target)]
        started = [kernels_of(registry, launch, op, backend, case) for case in served]
        few = [kernels_of(registry, launch, op, backend, cases[number]) for number in chosen]
        assert set().union(*few) == set().union(*started), f"{op} on {backend}"
        assert len(chosen) <= 1 + len(set().union(*started))


def test_decode_attention_has_one_of_each() -> None:
    launch = RecordingLauncher(KIND.capability, KIND.multiprocessors)
    registry = builtin_registry(launch)
    op = "attention.sparse_decode"
    chosen = one_of_each(registry, launch, op, "triton", KIND.target)
    started = [
        kernels_of(registry, launch, op, "triton", OPS[op].small_cases[number]) for number in chosen
    ]
    assert {"decode_wgmma", "decode_mma", "decode_plain"} <= set().union(*started)
    assert chosen[-1] == len(OPS[op].small_cases) - 1
