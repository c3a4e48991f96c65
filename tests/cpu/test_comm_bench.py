"""`bench comm`: every way against the floor, in a record, a table and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metainfer.bench import comm_report
from metainfer.bench.comm_report import text_report
from metainfer.bench.comm_settings import CommLoad
from metainfer.bench.plot_comm import draw_comm
from metainfer.bench.record import WIDTH
from metainfer.comm.contest import Point
from metainfer.core.errors import UserError
from metainfer.hardware.probe import probe
from metainfer.plan import comm_record
from tests.fakes.command import metainfer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("comm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_record, "default_cache", lambda: folder / "kept")
        patch.setattr(comm_report, "_MOST_SPREAD", 1e9)  # whatever else runs here
        ran = metainfer(
            "bench", "comm", "--ranks", "2", "--max-bytes", "4096", "--rounds", "2", "--wires",
            "int8", "--save-result", "--result-dir", str(folder), "--json",
        )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "from now on 2 ranks of a model here take the fastest of these ways" in ran.err
    found: dict[str, Any] = json.loads(ran.out)
    found["kept"] = comm_record.read(probe(), 2, found["threads"], folder / "kept")
    assert json.loads(Path(folder / "bench-comm.json").read_text()) == {
        k: v for k, v in found.items() if k != "kept"
    }
    return found


def test_every_way_is_measured_at_every_size(made: dict[str, Any]) -> None:
    ways = {(p["operation"], p["name"], p["bytes"]) for p in made["points"]}
    names = {"one-shot", "two-shot", "ring", "one-shot in int8", "two-shot in int8", "gloo",
             "gloo, summed here", "gloo, summed here in int8"}  # fmt: skip
    assert ways == {
        (operation, name, size)
        for size in (1024, 4096)
        for operation, name in (
            *(("all_reduce", name) for name in names),
            *((o, n) for o in ("all_gather", "reduce_scatter", "all_to_all")
              for n in ("shared memory", "gloo")),
            ("reduce_scatter", "shared memory in int8"), ("reduce_scatter", "gloo in int8"),
        )
    }  # fmt: skip
    for point in made["points"]:
        assert not point["wrong"]
        assert len(point["seconds"]) == 2
        assert 0 < point["low_s"] <= point["median_s"] <= point["high_s"]
    assert made["links"]["bytes_per_s"] > 0
    assert made["sizes_not_reached"] == []


def test_the_record_is_a_table_and_says_which_way_is_taken(made: dict[str, Any]) -> None:
    text = text_report(made)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "all_reduce, travelling in int8; times in us" in text
    assert "all_reduce: not gloo: its sums depend on how the work is divided" in text
    assert "all_to_all, " in text


def test_what_was_measured_is_kept_for_plans(made: dict[str, Any]) -> None:
    kept = made["kept"]
    assert isinstance(kept, comm_record.Compared)
    assert kept.date == made["date"][:10]
    assert len(kept.ways) == len(made["points"]) / 2  # sizes
    ring = next(way.rival for way in kept.ways if way.rival.name == "ring")
    points = [point for point in made["points"] if point["name"] == "ring"]
    assert ring.bytes == (1024, 4096)
    assert list(ring.seconds) == [min(point["seconds"]) for point in points]


def test_samples_that_differ_too_much_are_not_kept() -> None:
    def points(*spreads: float) -> list[Point]:
        return [Point("ring", "all_reduce", "plain", True, 1024, (x, 1.0), "") for x in spreads]

    assert not comm_report.too_noisy(points(1.1, 1.9, 9.0))
    assert comm_report.too_noisy(points(1.1, 2.1, 9.0))
    assert not comm_report.too_noisy([])


def test_what_was_wrong_or_not_reached_is_told(made: dict[str, Any]) -> None:
    points = [dict(point) for point in made["points"]]
    points[0] |= {"wrong": "2 of 512 numbers of rank 1 are wrong", "seconds": []}
    del points[0]["median_s"]
    told = text_report({**made, "points": points, "sizes_not_reached": [2**20]})
    assert "all_reduce by one-shot brought wrong data at 1.0 kB: 2 of 512" in told
    assert "not reached within 120 s: 1.0 MB" in told


def test_the_picture_has_every_way_and_the_floor(made: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    picture = draw_comm(made).decode()
    assert picture.startswith("<?xml")
    for operation in made["load"]["operations"]:
        assert f'id="{operation}-floor"' in picture
    assert "gloo, summed here" in picture
    assert draw_comm(made).decode() == picture


@pytest.mark.parametrize(
    "wrong", [{"ranks": 1}, {"ranks": 65}, {"max_bytes": 10}, {"rounds": 0}]
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError):
        CommLoad(**wrong)
