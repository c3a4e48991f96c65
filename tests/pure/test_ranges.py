"""Refusals of numbers name the flag, its range and the number."""

from __future__ import annotations

import math

import pytest

from metainfer.bench.quality_settings import QualityLoad
from metainfer.bench.serve_settings import ServeLoad
from metainfer.bench.stages_settings import StagesLoad
from metainfer.core.errors import UserError
from metainfer.core.ranges import MOST_DRAWN, require_above_zero, require_least, require_range


def test_numbers_in_range_pass_and_what_is_not_given() -> None:
    require_least("--rounds", None, 1)
    require_least("--lens", (), 1)
    require_least("--lens", (1, 2), 1)
    require_above_zero("--rate", math.inf)
    require_range("--share", 0.5, lambda share: 0 <= share <= 1, "from 0 to 1")


@pytest.mark.parametrize("wrong", [0, -3, math.nan, math.inf, (4, 0)])
def test_a_number_out_of_range_is_named(wrong: float | tuple[int, ...]) -> None:
    shown = 0 if isinstance(wrong, tuple) else wrong
    with pytest.raises(UserError) as caught:
        require_least("--rounds", wrong, 1)
    assert caught.value.message == f"--rounds must be at least 1, not {shown}"


def test_other_ranges_are_named() -> None:
    with pytest.raises(UserError, match="--rate must be above 0, not -0.5"):
        require_above_zero("--rate", -0.5)
    with pytest.raises(UserError, match="--share must be from 0 to 1, not 2"):
        require_range("--share", 2, lambda share: 0 <= share <= 1, "from 0 to 1")


def test_what_is_drawn_beforehand_fits_into_memory() -> None:
    QualityLoad(a="tuned", b="tuned", windows=MOST_DRAWN)
    for made in (
        lambda: QualityLoad(a="tuned", b="tuned", windows=10**11),
        lambda: StagesLoad(requests=10**11),
        lambda: ServeLoad(num_prompts=10**11),
    ):
        with pytest.raises(UserError, match=r"at most 1,000,000, not 100,000,000,000"):
            made()
