"""Which candidate runs calls of how many rows, by times that were measured."""

from __future__ import annotations

from typing import Any

import pytest

from metainfer.kernels.by_rows import by_rows, from_held, rows_of
from metainfer.kernels.registry import Backend, Kernel, Registry, Variant, no
from metainfer.kernels.tuned import (
    DEFAULT,
    Measured,
    Part,
    Timing,
    Tuned,
    choose,
    format_time,
    key_of,
)
from metainfer.ops.base import Target
from metainfer.ops.linear import DenseCase
from metainfer.ops.norm import RmsNormCase
from metainfer.plan.plan import Origin
from metainfer.plan.settings import EngineSettings
from metainfer.plan.tuning import Tuning, tuned_kernels

CARD = Target("cuda", (9, 0))
OP = "linear.dense"
CASE = DenseCase(32, 64)
NORM = RmsNormCase(64)


class Rows:
    """As many rows as a tensor would have."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def everybody(holder: str) -> tuple[str, ...]:
    return ("torch", "triton")


def measured(*timings: tuple[int, dict[str, float]], **bad: str) -> Measured:
    return Measured(tuple(Timing(rows, seconds) for rows, seconds in timings), bad)


def test_each_number_of_rows_has_its_fastest() -> None:
    found = measured(
        (1, {"torch": 24.1e-6, "triton": 18.8e-6}),
        (8, {"torch": 26.0e-6, "triton": 21.0e-6}),
        (512, {"torch": 90e-6, "triton": 130e-6}),
    )
    choice = choose(found, ("torch", "triton"), everybody)
    assert choice is not None
    assert choice.parts == (Part("triton", 8), Part("torch"))
    assert choice.why == "tuned: 18.8 us against 24.1 us at 1 row"


def test_what_gains_next_to_nothing_leaves_the_default() -> None:
    found = measured((1, {"torch": 1.00, "triton": 0.985}), (8, {"torch": 1.0, "triton": 1.1}))
    choice = choose(found, ("torch", "triton"), everybody)
    assert choice is not None
    assert choice.parts == (Part("torch"),)
    assert choice.why == "tuned: 1.00 s at 1 row, nothing is faster"


def test_bad_candidates_and_those_outside_the_order_are_not_taken() -> None:
    seconds = {"torch": 3.0, "triton": 2.0, "triton:low": 1.0, "cuda": 0.1}
    found = measured((1, seconds), **{"triton:low": "off by nan"})
    choice = choose(found, ("torch", "triton"), everybody)
    assert choice is not None
    assert choice.parts == (Part("triton"),)


def test_weights_are_prepared_once_for_all_parts() -> None:
    found = measured((1, {"cuda": 2.0, "triton": 1.0}), (512, {"cuda": 2.0, "triton": 6.0}))
    # Neither runs from the other's weights: the one that costs least over all.
    apart = choose(found, ("cuda", "triton"), lambda holder: (holder,))
    assert apart is not None
    assert apart.parts == (Part("cuda"),)
    # Weights of the first hold those of the second, not the other way round.
    held = choose(found, ("cuda", "triton"), lambda h: ("cuda", "triton")[h == "triton" :])
    assert held is not None
    assert held.parts == (Part("triton", 1), Part("cuda"))
    assert held.holder == "cuda"


def test_without_times_of_the_default_nothing_is_tuned() -> None:
    assert choose(measured((1, {"triton": 1.0})), ("torch", "triton"), everybody) is None
    assert choose(measured(), ("torch",), everybody) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234e-6, "1.23 us"), (18.8e-6, "18.8 us"), (241e-6, "241 us"), (2.41e-3, "2.41 ms"),
     (0.99961e-3, "1.00 ms"), (1.5, "1.50 s")],
)  # fmt: skip
def test_times_have_three_figures(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_rows_of_a_call_are_where_the_op_has_them() -> None:
    assert rows_of(OP, (Rows(7, 64),)) == 7
    assert rows_of("attention.index_topk", ((Rows(5, 2, 8), Rows(5, 2)), Rows(9, 1))) == 5
    assert rows_of("attention.merge", (Rows(2, 9, 4, 8), Rows(2, 9, 4))) == 9
    assert rows_of("cache.read", (Rows(1000, 64), Rows(3))) == 3


def test_a_call_goes_to_the_part_of_its_rows() -> None:
    run = by_rows(
        OP, True, [(1, lambda *_: "one"), (8, lambda *_: "few"), (None, lambda *_: "all")]
    )
    assert [run("weights", Rows(n, 64)) for n in (0, 1, 2, 8, 9)] == [
        "one", "one", "few", "few", "all",
    ]  # fmt: skip
    assert from_held(lambda mine, x: (mine, x), len)([1, 2], "x") == (2, "x")


def backend(op: str, name: str, **fields: Any) -> Backend:
    return Backend(op, name, lambda case, *arguments: (name, *arguments), **fields)


def registry(op: str, case: Any, found: Measured, target: Target = CARD, **fields: Any) -> Registry:
    variant = Variant(lambda case, *arguments: ("low", *arguments))
    backends = (
        backend(op, "torch", prepare=lambda case, weight: ("prepared", weight), **fields),
        backend(op, "triton", variants={"low": variant}),
        backend(op, "reference"),
    )
    return Registry(backends, Tuned(target, {key_of(op, case): found}))


def bound(found: Measured, order: str = "", target: Target = CARD, **fields: Any) -> Kernel:
    return registry(OP, CASE, found, target, **fields).bind(OP, CASE, CARD, order)


FEW_TO_TRITON = measured(
    (8, {"torch": 2.0, "triton": 1.5, "triton:low": 1.0}),
    (512, {"torch": 1.0, "triton": 1.5, "triton:low": 1.5}),
)


def test_a_kernel_of_two_backends_runs_from_weights_that_one_prepared() -> None:
    kernel = bound(FEW_TO_TRITON, holds={"triton": lambda held: held[1]})
    assert kernel.backend == "torch"
    assert kernel.backends == ("torch", "triton")
    assert kernel.runs_on == "triton:low to 8 rows, then torch"
    assert kernel.why == "tuned: 1.00 s against 2.00 s at 8 rows"
    few, many = Rows(8, 64), Rows(9, 64)
    held = kernel.prepare("w")
    assert kernel.run(held, few) == ("low", "w", few)
    assert kernel.run(held, many) == ("torch", ("prepared", "w"), many)


def test_a_kernel_that_is_not_tuned_follows_the_order_and_says_so() -> None:
    for kernel in (
        bound(FEW_TO_TRITON, target=Target("cuda", (12, 0))),
        Registry((backend(OP, "torch"), backend(OP, "triton"))).bind(OP, CASE, CARD),
    ):
        assert kernel.runs_on == "torch"
        assert kernel.why == DEFAULT


def test_the_order_of_a_plan_limits_what_is_chosen() -> None:
    assert bound(FEW_TO_TRITON, f"{OP}=triton").runs_on == "triton:low to 8 rows, then triton"
    assert bound(FEW_TO_TRITON, f"{OP}=reference").runs_on == "reference"


def test_what_is_known_to_be_wrong_is_not_bound_and_the_reason_is_told() -> None:
    wrong = measured((8, {"torch": 1.0, "triton": 3.0}), torch="off by nan")
    made = registry(OP, CASE, wrong)
    assert made.bind(OP, CASE, CARD).runs_on == "triton"
    verdicts = dict(made.explain(OP, CASE, CARD))
    assert verdicts["torch"] == no("known bad on this card: off by nan")
    assert verdicts["triton"]


def test_expanded_weights_are_the_plans_choice_not_the_clocks() -> None:
    found = measured((8, {"cpu": 2.0, "big": 1.0}))
    backends = (backend(OP, "cpu"), backend(OP, "big", expands=True))
    made = Registry(backends, Tuned(CARD, {key_of(OP, CASE): found}))
    assert made.bind(OP, CASE, CARD, f"{OP}=cpu,big").runs_on == "cpu"
    assert made.bind(OP, CASE, CARD, f"{OP}=big,cpu").runs_on == "big"


def test_operations_without_weights_need_not_share_any() -> None:
    op = "norm.rms_norm"
    found = measured((8, {"torch": 2.0, "triton": 1.0}), (64, {"torch": 1.0, "triton": 2.0}))
    kernel = registry(op, NORM, found).bind(op, NORM, CARD, "*=torch,triton")
    assert kernel.runs_on == "triton to 8 rows, then torch"
    assert kernel.run(Rows(64, 64))[0] == "torch"


@pytest.mark.parametrize(
    ("flag", "tuning", "value", "origin", "reason"),
    [
        (None, Tuning(3, "3 operations were tuned"), "on", Origin.MEASURED, "3 operations were"),
        (None, Tuning(0, "tuned for 132 SMs, this card has 188"), "on", Origin.DEFAULT,
         "tuned for 132 SMs, this card has 188; `metainfer kernels tune` does it"),
        (None, None, "on", Origin.DEFAULT, "what was kept for this card counts"),
        (True, Tuning(0, "nothing was tuned"), "on", Origin.FLAG, "nothing was tuned; "),
        (False, Tuning(3, "3 were"), "off", Origin.FLAG, "given with --no-tuned-kernels"),
    ],
)  # fmt: skip
def test_a_plan_says_whether_kernels_are_tuned_and_why(
    flag: bool | None, tuning: Tuning | None, value: str, origin: Origin, reason: str
) -> None:
    told = tuned_kernels(EngineSettings(tuned_kernels=flag), tuning)
    assert (told.value, told.origin) == (value, origin)
    assert told.reason.startswith(reason)
