"""Predictions beside published figures: the data file, the fit, the table and its page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from metainfer.plan.calibrate import Sensitivity, fitted
from metainfer.plan.cost.constants import Calibrated, calibrated_values, read_constants
from metainfer.plan.published import CONTEXT, read_published
from metainfer.plan.validate import NEAR, fitted_on_all, summary_of, validate
from metainfer.plan.validate_text import page_lines, record, text
from tests.fakes.command import metainfer

PAGE = Path(__file__).parents[2] / "docs" / "plan-validation.md"


def test_figures_have_sources_and_say_what_is_assumed() -> None:
    figures = read_published()
    assert len({row.id for row in figures.rows}) == len(figures.rows)
    for row in figures.rows:
        assert row.source and row.assumed and row.published > 0
        assert row.case.engine in read_constants().profiles
    assert all(one.source and one.why for one in figures.listed)
    beat = {row.published for row in figures.rows if row.beat}
    assert {1932, 5850, 13274, 14546, 22584, 3236.78, 6222.72} <= beat
    assert any("296 and 131 clips" in one.value for one in figures.listed)


def test_predictions_are_as_near_as_the_page_says() -> None:
    found = validate()
    together = summary_of(row.error for row in found.rows)
    apart = summary_of(row.error_apart for row in found.rows)
    assert together.mean < 0.12 and together.near >= 0.95 * together.rows
    assert apart.mean < 0.14 and apart.near >= 0.9 * apart.rows
    # What figures move is little: single operations set where constants start.
    starts = summary_of(row.error_at_starts for row in found.rows)
    assert starts.mean < 0.13 and starts.near >= 0.88 * starts.rows
    others = summary_of(row.error_apart for row in found.rows if not row.published.own)
    assert others.mean < 0.14 and others.near >= 0.9 * others.rows
    # The engine whose kernels are known is the one whose layouts are compared most.
    known = [row.error_apart for row in found.rows if row.published.case.engine == "b12x"]
    assert summary_of(known).mean < 0.1
    assert all(order.right and order.right_apart for order in found.orders)


def test_rows_that_are_far_off_say_what_is_known_of_why() -> None:
    found = validate()
    far = [
        row for row in found.rows if max(abs(row.error), abs(row.error_apart)) > NEAR
    ]  # fmt: skip
    assert far and all(row.published.off for row in far)
    page = "\n".join(page_lines(found))
    told = page.split("## Rows that are off by more than 30 %")[1].split("## Rows")[0]
    assert all(row.published.id in told for row in far)
    assert told.count("\n- ") == len(far)


def test_no_figure_sets_a_constant_of_this_engine() -> None:
    own = [row for row in validate().rows if row.published.own]
    assert len(own) == 10 and {row.published.case.machine for row in own} == {"h200-x1"}
    assert all(row.predicted == row.apart and abs(row.error) < NEAR for row in own)
    assert all("metainfer" not in one.path for one in read_constants().calibrated)


def test_rows_of_a_machine_do_not_set_the_constants_that_predict_them_apart() -> None:
    for row in validate().rows:
        if row.published.case.quantity == CONTEXT:
            assert row.predicted == row.apart
    moved = [row for row in validate().rows if row.published.case.engine == "stock"]
    assert any(abs(row.error - row.error_apart) > 0.1 for row in moved)


def test_constants_that_ship_are_those_that_all_figures_set() -> None:
    shipped, all_figures = calibrated_values(), fitted_on_all()
    for one in read_constants().calibrated:
        value = shipped[one.path]
        assert one.low <= value <= one.high
        # Around them predictions are no straight lines, and they are rounded.
        assert all_figures[one.path] == pytest.approx(value, rel=0.1), one.name


def test_a_fit_finds_what_made_the_figures_and_stays_within_bounds() -> None:
    paths = (("a",), ("b",))
    free = [Calibrated(path, 1.0, 0.1, 10.0, "") for path in paths]
    slopes = {paths[0]: [1.0, 0.0, 1.0] * 40, paths[1]: [0.0, 1.0, -1.0] * 40}
    truth = {paths[0]: 0.2, paths[1]: -0.3}
    residuals = [-sum(truth[p] * slopes[p][n] for p in paths) for n in range(120)]
    found = Sensitivity(residuals, slopes)
    shipped = dict.fromkeys(paths, 1.0)
    got = fitted(found, free, shipped, range(120))
    assert got[paths[0]] == pytest.approx(math.exp(0.2), rel=0.01)
    assert got[paths[1]] == pytest.approx(math.exp(-0.3), rel=0.01)
    tight = [Calibrated(path, 1.0, 0.9, 1.1, "") for path in paths]
    bound = fitted(found, tight, shipped, range(120))
    assert bound[paths[0]] == pytest.approx(1.1) and bound[paths[1]] == pytest.approx(0.9)
    # Without figures constants are what they would be without figures.
    assert fitted(found, free, dict.fromkeys(paths, 3.0), ())[paths[0]] == pytest.approx(1.0)


def test_one_figure_that_is_far_off_does_not_pull_the_others() -> None:
    free = [Calibrated(("a",), 1.0, 0.1, 10.0, "")]
    slopes = {("a",): [1.0] * 11}
    found = Sensitivity([0.0] * 10 + [-2.0], slopes)
    assert fitted(found, free, {("a",): 1.0}, range(11))[("a",)] < 1.1


def test_the_verb_and_the_page() -> None:
    ran = metainfer("plan", "validate", "--explain")
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= 100
    assert "beat-v41-3" in ran.out and "clips an hour" in ran.out
    written = json.loads(metainfer("plan", "validate", "--json").out)
    assert written == json.loads(json.dumps(record(validate())))
    assert {row["id"] for row in written["rows"]} == {row.id for row in read_published().rows}
    assert text(validate(), explain=False).splitlines()[0] in PAGE.read_text(encoding="utf-8")
    assert page_lines(validate())[0] in PAGE.read_text(encoding="utf-8")


def test_help_of_plan_is_its_own() -> None:
    assert "--workload" in metainfer("plan", "--help").out
    assert "--explain" in metainfer("plan", "validate", "--help").out
