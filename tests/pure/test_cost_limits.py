"""What a card is held back by, and how much is doubtful of what one box alone tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metainfer.arch.shape_of import read_shape
from metainfer.hardware.curves import MEASURED_HERE, NCCL, Curve, Rate
from metainfer.hardware.known import machine_of
from metainfer.hardware.machine import Clocks, Machine, Power, Unknown, gpus_of
from metainfer.plan.cost.constants import (
    DOUBTFUL,
    INFERRED,
    MEASURED,
    PUBLISHED,
    read_constants,
)
from metainfer.plan.cost.phases import Phases
from metainfer.plan.cost.predict import Prediction, predict
from metainfer.plan.cost.rates import Rates, origin_of
from metainfer.plan.cost.transfers import ALL_REDUCE, Transfers
from metainfer.plan.layouts import Formats, Layout, Layouts
from metainfer.plan.workload import Workload

CONSTANTS = read_constants()
B12X, STOCK = CONSTANTS.profile("b12x"), CONSTANTS.profile("stock")
BOX = machine_of("rtx-pro-6000-x4")
MAX_Q = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


def with_cards(machine: Machine = BOX, **changed: Any) -> Machine:
    return replace(machine, gpus=tuple(replace(gpu, **changed) for gpu in gpus_of(machine)))


def rates(machine: Machine) -> Rates:
    return Rates(machine, CONSTANTS, B12X)


def predicted(machine: Machine, ranks: int = 4) -> Prediction:
    phases = Phases(read_shape("deepseek-v4-flash"), machine, CONSTANTS, STOCK)
    one = Layout(tensor=ranks)
    return predict(phases, Layouts(one, one), Formats(), Workload())


def test_products_follow_the_limit_of_power_and_bandwidth_does_not() -> None:
    whole, half = rates(BOX), rates(with_cards(power=Power(300.0, 600.0)))
    share = 0.5 ** CONSTANTS.kernel("power_exponent")
    assert share == pytest.approx(0.794, abs=0.002)
    for work in ("product fp8", "product bf16", "experts fp4", "attention bf16", "index fp8"):
        found = half.of(work, 8192)
        assert found.per_s == pytest.approx(share * whole.of(work, 8192).per_s), work
        assert "at 300 of 600 W" in found.why
    assert half.memory().per_s == whole.memory().per_s
    # A higher limit than the card's, or none that is known, changes nothing.
    for power in (Power(700.0, 600.0), Power(Unknown("no"), 600.0), Unknown("no")):
        same = rates(with_cards(power=power)).of("product fp8", 8192)
        assert same == whole.of("product fp8", 8192)


def test_products_follow_the_highest_clock() -> None:
    whole = rates(BOX).of("product fp8", 8192)
    slow = rates(with_cards(clocks=Clocks(1500, 1000, 1215))).of("product fp8", 8192)
    assert slow.per_s == pytest.approx(whole.per_s / 2, rel=0.001)
    assert "at 1,215 of 2,430 MHz" in slow.why
    # The narrower of both limits counts, for a clock that is held takes less power.
    both = with_cards(clocks=Clocks(1500, 1000, 1215), power=Power(300.0, 600.0))
    assert rates(both).of("product fp8", 8192).per_s == slow.per_s
    faster = with_cards(clocks=Clocks(2000, 1000, 3090))
    assert rates(faster).of("product fp8", 8192) == whole


def test_a_max_q_is_the_same_silicon_at_half_of_the_power() -> None:
    max_q = with_cards(replace(BOX, rates=()), name=MAX_Q, power=Power(300.0, 300.0))
    limited = with_cards(replace(BOX, rates=()), power=Power(300.0, 600.0))
    for work in ("product fp8", "experts fp4", "product bf16"):
        mine, other = (rates(one).of(work, 8192) for one in (max_q, limited))
        assert mine.per_s == pytest.approx(other.per_s, rel=0.01), work
        assert mine.origin == INFERRED


def test_a_card_that_is_not_listed_follows_its_limit_too() -> None:
    odd = {"name": "NVIDIA RTX 5555", "memory_bytes_per_s": 1e12, "multiprocessors": 100,
           "clocks": Clocks(2000, 1000, 2500)}  # fmt: skip
    alone = replace(BOX, rates=())
    whole = rates(with_cards(alone, power=Power(400.0, 400.0), **odd))
    held = rates(with_cards(alone, power=Power(200.0, 400.0), **odd))
    ratio = held.of("product fp8", 8192).per_s / whole.of("product fp8", 8192).per_s
    assert ratio == pytest.approx(0.5 ** CONSTANTS.kernel("power_exponent"))
    assert held.memory().per_s == whole.memory().per_s


def test_what_was_measured_under_a_limit_is_not_lowered_again() -> None:
    own = Rate("product fp8", 8192, 4e14, MEASURED_HERE)
    held = with_cards(replace(BOX, rates=(own,)), power=Power(300.0, 600.0))
    assert rates(held).of("product fp8", 8192).per_s == pytest.approx(4e14)


def test_what_one_box_tells_of_islands_is_doubtful() -> None:
    islands = replace(machine_of("l40s-x8"), curves=())
    transfers = Transfers(islands, CONSTANTS, STOCK)
    assert transfers.exchange(ALL_REDUCE, 2.0**26, 8).origin == DOUBTFUL
    assert transfers.exchange(ALL_REDUCE, 2.0**26, 4).origin == DOUBTFUL
    amd = replace(islands, cpu=replace(islands.cpu, model="AMD EPYC 9555"))
    assert Transfers(amd, CONSTANTS, STOCK).exchange(ALL_REDUCE, 2.0**26, 8).origin == INFERRED
    assert CONSTANTS.uncertainty[DOUBTFUL] > 3 * CONSTANTS.uncertainty[INFERRED]
    assert predicted(islands, 8).input_error > 0.7
    assert predicted(machine_of("l40s-x8"), 8).input_error < 0.2  # there it was published


def test_curves_of_other_machines_are_inferred() -> None:
    assert origin_of(f"{MEASURED_HERE}, alone") == MEASURED
    assert origin_of("a page of 8 cards; inferred: 10 us a copy") == PUBLISHED
    for name, machine in (("l20-x8", "L40S"), ("rtx-6000d-x8", "RTX PRO 6000")):
        curves = [c for c in machine_of(name).curves if machine in c.source]
        assert curves and {origin_of(c.source) for c in curves} == {INFERRED}
    l20, l40s = (predicted(machine_of(name), 8) for name in ("l20-x8", "l40s-x8"))
    assert l20.input_error > 1.3 * l40s.input_error


def test_a_curve_without_slope_goes_on_as_links_do() -> None:
    def seconds(last: float) -> float:
        curve = Curve(NCCL, ALL_REDUCE, (0, 1, 2, 3), True, (2**10, 2**16), (4e-5, last), True,
                      MEASURED_HERE)  # fmt: skip
        transfers = Transfers(replace(BOX, curves=(curve,)), CONSTANTS, STOCK)
        return transfers.exchange(ALL_REDUCE, 2.0**26, 4).seconds

    flat, falling, rising = seconds(4e-5), seconds(3.9e-5), seconds(6e-5)
    least = 1.5 * (2**26 - 2**16) / 64e9  # at the coded rate of Gen5 over 16 lanes
    assert flat > least and falling > least
    assert rising > flat
