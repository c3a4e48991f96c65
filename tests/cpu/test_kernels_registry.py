"""The registry: order, verdicts and refusals, with backends made for the purpose."""

from __future__ import annotations

import pytest

from metainfer.core.errors import MetainferError, UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.registry import YES, Backend, Registry, Verdict, no
from metainfer.ops.base import Target
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.norm import RmsNormCase

OP = "norm.rms_norm"
CPU = Target("cpu")
CARD = Target("cuda", (8, 9))
CASE = RmsNormCase(32)


def narrow(case: RmsNormCase, target: Target) -> Verdict:
    return YES if case.width <= 64 else no(f"width {case.width} is more than 64")


def on_cards(case: RmsNormCase, target: Target) -> Verdict:
    return YES if target.type == "cuda" else no(f"runs on cuda alone, not on {target}")


def some_registry() -> Registry:
    return Registry(
        (
            Backend(OP, "cpu", lambda case, x: ("cpu", case, x), narrow),
            Backend(OP, "card", lambda case, x: ("card", case, x), on_cards),
            Backend(OP, REFERENCE, lambda case, x: ("reference", case, x)),
            Backend("moe.swiglu", "wide", lambda case, x: x, expands=True),
        )
    )


def test_the_default_order_on_a_cpu_takes_the_fast_backend_then_the_reference() -> None:
    registry = some_registry()
    assert registry.bind(OP, CASE, CPU).backend == "cpu"
    assert registry.bind(OP, RmsNormCase(65), CPU).backend == REFERENCE


def test_a_kernel_is_bound_to_its_case() -> None:
    kernel = some_registry().bind(OP, CASE, CPU)
    assert kernel.run(7) == ("cpu", CASE, 7)
    assert kernel.prepare("a", "b") == ("a", "b")


def test_prepare_of_the_backend_gets_the_case() -> None:
    backend = Backend(OP, "cpu", lambda case: None, prepare=lambda case, weight: (case, weight))
    assert Registry((backend,)).bind(OP, CASE, CPU).prepare(3) == (CASE, 3)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("norm.rms_norm=reference,cpu", REFERENCE),
        (" norm.rms_norm = card , cpu ; moe.swiglu=wide", "cpu"),
        ("*=reference", REFERENCE),
        ("*=reference;norm.rms_norm=cpu", "cpu"),
        ("moe.swiglu=wide", "cpu"),
        ("*=wide,reference", REFERENCE),
        (" ; ", "cpu"),
    ],
)
def test_orders(order: str, expected: str) -> None:
    registry = some_registry()
    registry.check_order(order)
    assert registry.bind(OP, CASE, CPU, order).backend == expected


@pytest.mark.parametrize(
    ("order", "message", "hint"),
    [
        ("norm.rms=cpu", "unknown op norm.rms", "norm.rms_norm"),
        ("norm.rms_norm=fast", "unknown backend fast for norm.rms_norm", "card, cpu, reference"),
        ("norm.rms_norm=wide", "unknown backend wide", "card, cpu, reference"),
        ("*=fast", r"unknown backend fast for \*", "card, cpu, reference, wide"),
        ("norm.rms_norm=", "must list backends of norm.rms_norm once", "rms_norm=card,cpu'"),
        ("norm.rms_norm", "must list backends of norm.rms_norm once", "rms_norm=card,cpu'"),
        ("*=cpu;*=card", r"must list backends of \* once", "'*=card,cpu'"),
    ],
)
def test_orders_that_make_no_sense(order: str, message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        some_registry().check_order(order)
    assert hint in str(caught.value.hint)
    with pytest.raises(UserError, match=message):
        some_registry().bind(OP, CASE, CPU, order)


def test_a_refusal_holds_every_verdict() -> None:
    with pytest.raises(UserError) as caught:
        some_registry().bind(OP, RmsNormCase(65), CPU, "norm.rms_norm=cpu,card")
    assert "nothing that the plan allows runs norm.rms_norm on cpu" in caught.value.message
    assert "cpu: width 65 is more than 64" in caught.value.message
    assert "card: runs on cuda alone, not on cpu" in caught.value.message
    assert "reference: not in the kernel order" in caught.value.message
    assert "norm.rms_norm=reference" in str(caught.value.hint)


def test_on_a_card_the_reference_must_be_named() -> None:
    registry = some_registry()
    with pytest.raises(UserError, match="on cuda:sm_89 .*reference: not in the kernel order"):
        registry.bind(OP, CASE, CARD)
    assert registry.bind(OP, CASE, CARD, "*=reference").backend == REFERENCE


def test_explain_lists_every_backend_those_of_the_order_first() -> None:
    explained = some_registry().explain(OP, RmsNormCase(65), CPU, "norm.rms_norm=reference,cpu")
    assert [name for name, _ in explained] == [REFERENCE, "cpu", "card"]
    assert [bool(verdict) for _, verdict in explained] == [True, False, False]
    assert explained[1][1].reason == "width 65 is more than 64"


def test_backends_that_cannot_be_registered() -> None:
    twice = Backend(OP, "cpu", lambda case: None)
    with pytest.raises(MetainferError, match="two backends called cpu"):
        Registry((twice, twice))
    with pytest.raises(MetainferError, match="unknown op norm.layer"):
        Registry((Backend("norm.layer", "cpu", lambda case: None),))


def test_capabilities_of_the_registry() -> None:
    found = some_registry().capabilities(CPU)
    assert found.backends[OP] == ("cpu", "card", REFERENCE)
    assert found.default_order == ("native", "cpu", REFERENCE)
    assert found.expanding == {"wide"}
    assert found.backend_of(OP) == "cpu"
    assert found.backend_of(OP, f"{OP}=card,cpu") == "card"
    assert found.backend_of("moe.swiglu") is None
    on_card = some_registry().capabilities(CARD)
    assert on_card.backend_of(OP) is None
    assert on_card.backend_of(OP, f"*={REFERENCE}") == REFERENCE


def test_every_op_runs_on_a_cpu_at_every_model_shape() -> None:
    registry = builtin_registry()
    for name, op in OPS.items():
        for cases in op.cases.values():
            for case in cases:
                assert registry.bind(name, case, CPU).case is case
