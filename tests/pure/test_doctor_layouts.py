"""The support matrix of layouts: works, refused because, has no effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.arch.families import known_names
from metainfer.arch.shape_of import read_shape
from metainfer.cli.doctor_text import layouts_text, record_of_matrix
from metainfer.core.errors import UserError
from metainfer.doctor.estimate import STOCK, workload_of
from metainfer.doctor.layout_matrix import idle_flags, layout_rows, plain_layouts
from metainfer.doctor.matrix import State, matrix
from metainfer.hardware.facts import Unknown
from metainfer.hardware.known import machine_of
from metainfer.plan.ledger_ranks import RankLedgers
from metainfer.plan.search import search

V4, V41, GLM = map(read_shape, ("deepseek-v4-flash", "deepseek-v4.1-flash", "glm-5.3"))


def by_name(machine: str, shape) -> dict:
    return {row.layout: row for row in layout_rows(shape, machine_of(machine))}


def test_what_runs_what_is_refused_and_why():
    rows = by_name("rtx-6000d-x8", V4)
    assert len(rows) == len(list(plain_layouts(8)))
    assert rows["8 x 1 GPU"].own[0] is State.REFUSED and "too much" in rows["8 x 1 GPU"].own[1]
    assert rows["TP8"].others[0] is State.WORKS and "input tok/s" in rows["TP8"].expected
    assert rows["CP8 | TP8"].others == (
        State.REFUSED, "as plans count them, vLLM and SGLang do not divide prompts over ranks",
    )  # fmt: skip
    assert rows["PP8"].own[0] in (State.PLANNED, State.WORKS)
    for row in rows.values():
        assert row.own[1] and row.others[1]
        assert bool(row.expected) == (row.others[0] is State.WORKS)


def test_caches_are_divided_only_where_there_are_entries():
    layers = tuple(replace(layer, owns_entries=False) for layer in V4.side.layers)
    bare = replace(V4, side=replace(V4.side, layers=layers))
    (row,) = (r for r in layout_rows(bare, machine_of("rtx-pro-6000-x2")) if r.layout == "TP2 KV2")
    assert row.own[0] is row.others[0] is State.NO_EFFECT and "no entries" in row.own[1]


def test_small_chunks_count_where_they_alone_fit():
    assert by_name("l40s-x8", V4)["2 x TP4"].others[0] is State.WORKS


@pytest.mark.parametrize("name", ["l40s-x8", "rtx-pro-6000-x4", "a100-pcie-x8"])
def test_a_plain_layout_that_the_plan_chose_works_here_too(name: str):
    machine = machine_of(name)
    for shape in (V4, V41, GLM):
        rows = {row.layout: row for row in layout_rows(shape, machine)}
        try:
            found = search(shape, machine, workload_of(shape), RankLedgers(), profile=STOCK)
        except UserError:
            assert all(row.others[0] is not State.WORKS for row in rows.values())
            continue
        chosen = rows.get(found.best.layouts.name)
        if chosen is not None and found.best.formats.experts == "released":
            assert chosen.others[0] is State.WORKS


def test_flags_that_others_take_for_nothing_are_named():
    (cell,) = idle_flags(V41, machine_of("rtx-6000d-x8"))
    assert cell.state is State.NO_EFFECT and "--enable-dp-attention" in cell.flag
    assert not idle_flags(V4, machine_of("rtx-6000d-x8"))


def test_text_is_narrow_and_without_cards_there_is_none():
    for name in ("rtx-6000d-x8", "rtx-5070ti-x2", "h200-x1"):
        machine = machine_of(name)
        for shape in map(read_shape, known_names()):
            assert max(map(len, layouts_text(layout_rows(shape, machine)).splitlines())) <= 100
    assert layout_rows(V4, replace(machine_of("l40s-x8"), gpus=Unknown("no"))) == ()


def test_the_record_has_both_parts():
    machine = machine_of("rtx-pro-6000-x2")
    told = record_of_matrix(matrix(V4, machine), layout_rows(V4, machine))
    assert set(told) == {"features", "layouts"} and len(told["layouts"]) == 6
    assert {"layout", "own", "others", "expected"} == set(told["layouts"][0])
