"""`bench plot`: what the pictures hold, and what cannot be drawn."""

from __future__ import annotations

import errno
import json
import random
import statistics
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metainfer.bench import record as record_module
from metainfer.bench.contender import ENGINE, Timing
from metainfer.bench.http_stream import Outcome
from metainfer.bench.model import SideResult, works
from metainfer.bench.model_report import record as model_record
from metainfer.bench.model_settings import ModelLoad
from metainfer.bench.plot_records import ServeRecord, read_records
from metainfer.bench.serve import Measured, Run
from metainfer.bench.serve_report import record as serve_record
from metainfer.bench.serve_settings import ServeLoad, ServeResults
from tests.fakes.command import metainfer

MACHINE = {
    "cpu": {"model": "Some Processor", "physical_cores": 6},
    "gpus": [{"name": "Some GPU"}, {"name": "Some GPU"}],
}
ROUNDS = 4
DETAILED = ServeResults(save_detailed=True)
SVG = "{http://www.w3.org/2000/svg}"


def write(path: Path, made: dict[str, Any]) -> str:
    path.write_text(json.dumps(made), encoding="utf-8")
    return str(path)


def model_made() -> dict[str, Any]:
    """Three sides, a prefill and two decodes, of which each round has another rate."""
    load = ModelLoad(rounds=ROUNDS, decode_batches=(1, 8))
    generator = random.Random(5)

    def side(name: str, dtype: str, rate: float, peak: int) -> SideResult:
        timings = {
            work.name: tuple(
                Timing(100, 100 / (rate * generator.uniform(0.9, 1.1))) for _ in range(ROUNDS)
            )
            for work in works(load)
        }
        return SideResult(name, dtype, timings, 50_000_000, peak, ())

    sides = [
        side(ENGINE, "bfloat16", 300.0, 150_000_000),
        side("float32", "float32", 100.0, 300_000_000),
        side("bfloat16", "bfloat16", 60.0, 200_000_000),
    ]
    return model_record(sides, load, "pebble", 2, MACHINE)


def serve_made(
    rate: float = 4.0, label: str | None = "ours", runs: int = 2,
    results: ServeResults = DETAILED, requests: int = 10, failed: int = 0, **load: Any,
) -> dict[str, Any]:  # fmt: skip
    """Runs of so many requests: the n-th has its first token after (n + 1) / rate seconds."""
    good = [
        Outcome("", 0.0, (n + 4) / rate, (n + 1) / rate, (0.01, 0.02), 20, 3)
        for n in range(requests - failed)
    ]
    bad = [Outcome("HTTP 503", 0.0, 0.1)] * failed
    measured = Measured("pebble", 1, tuple(Run((*good, *bad), 5.0 + k, False) for k in range(runs)))
    settings = ServeLoad(num_prompts=requests, request_rate=rate, repeats=runs, **load)
    named = ServeResults(
        results.percentile_metrics, results.metric_percentiles,
        save_detailed=results.save_detailed, label=label,
    )  # fmt: skip
    return serve_record(measured, settings, named, MACHINE)


def plotted(*arguments: str | Path) -> ET.Element:
    """The SVG that `bench plot` wrote of these records."""
    ran = metainfer("bench", "plot", *map(str, arguments))
    assert ran.code == 0, ran.err
    return ET.fromstring(Path(ran.out.strip()).read_text(encoding="utf-8"))


def texts(svg: ET.Element) -> str:
    return "\n".join("".join(element.itertext()) for element in svg.iter(f"{SVG}text"))


def groups(svg: ET.Element, prefix: str) -> dict[str, int]:
    """Id of each group that begins so -> how many markers it holds."""
    return {
        group.attrib["id"]: len(list(group.iter(f"{SVG}use")))
        for group in svg.iter(f"{SVG}g")
        if group.get("id", "").startswith(prefix)
    }


def test_every_round_of_every_side_is_a_marker_with_a_median(tmp_path: Path) -> None:
    made = model_made()
    svg = plotted(write(tmp_path / "model.json", made))
    assert groups(svg, "rounds-") == {
        f"rounds-0-{work}-{side}": ROUNDS for work in range(3) for side in range(3)
    }
    assert len(groups(svg, "median-")) == 9
    assert set(groups(svg, "peak-").values()) == set(groups(svg, "libraries-").values()) == {1}
    said = texts(svg)
    for work in made["works"]:
        assert work["name"] in said
        assert f"{work['ratio']:.2f} times transformers {work['peer']}" in said
        assert f"({work['ratio_low']:.2f} to {work['ratio_high']:.2f} over the rounds)" in said
    prefill = made["sides"][0]["tokens_per_s"]["prefill 2048"]
    assert f"median {statistics.median(prefill):.0f}" in said
    assert "0.75 times transformers bfloat16" in said  # of memory: the peer that needs least
    assert said.count("tokens/s") == 3 and "MB" in said.split()
    assert "pebble; Some Processor, 6 cores, 2 x Some GPU, 2 threads; commit " in said


def test_heights_of_markers_are_the_rates(tmp_path: Path) -> None:
    made = model_made()
    svg = plotted(write(tmp_path / "model.json", made))
    rates = made["sides"][1]["tokens_per_s"]["decode batch 8"]
    (group,) = (g for g in svg.iter(f"{SVG}g") if g.get("id") == "rounds-0-2-1")
    heights = [-float(use.attrib["y"]) for use in group.iter(f"{SVG}use")]
    scale = (heights[1] - heights[0]) / (rates[1] - rates[0])
    for height, rate in zip(heights, rates, strict=True):
        assert height - heights[0] == pytest.approx(scale * (rate - rates[0]), abs=1e-3)


def test_several_model_records_are_rows_with_their_names(tmp_path: Path) -> None:
    made = model_made()
    paths = [write(tmp_path / name, made) for name in ("before.json", "after.json")]
    svg = plotted(*paths, "--out", tmp_path / "both.svg")
    assert len(groups(svg, "rounds-")) == 2 * 9
    assert {"before.json", "after.json"} <= set(texts(svg).splitlines())
    assert texts(svg).count("Some Processor") == 1  # one origin is told once


def test_distributions_of_every_run(tmp_path: Path) -> None:
    svg = plotted(write(tmp_path / "one.json", serve_made(failed=2)))
    metrics = ("ttft", "tpot", "itl", "e2el")
    assert set(groups(svg, "share-")) == {f"share-{m}-0-{run}" for m in metrics for run in (0, 1)}
    assert set(groups(svg, "marks-").values()) == {2}
    assert not groups(svg, "series-")
    said = texts(svg)
    assert "ours, 4 req/s: 16 requests in 2 runs, 4 failed and not drawn" in said
    assert all(f"({name})" in said for name in ("TTFT", "TPOT", "ITL", "end to end"))
    assert "milliseconds at most" in said and "requests, %" in said and "gaps, %" in said


def test_samples_are_those_of_the_report(tmp_path: Path) -> None:
    made = serve_made()
    (read,) = read_records([Path(write(tmp_path / "one.json", made))])
    assert isinstance(read, ServeRecord)
    run, figures = read.runs[0], made["runs"][0]
    assert run.samples_ms is not None
    for metric, values in run.samples_ms.items():
        assert statistics.fmean(values) == pytest.approx(figures[f"mean_{metric}_ms"])
    assert run.ttft_ms["p99"] == pytest.approx(figures["p99_ttft_ms"])
    assert read.median_run.throughput == pytest.approx(made["total_token_throughput"])


def test_several_records_give_throughput_by_engine_in_order_of_load(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "ours-8.json", serve_made(8.0)),
        write(tmp_path / "ours-2.json", serve_made(2.0)),
        write(tmp_path / "theirs.json", serve_made(2.0, "$theirs_1", max_concurrency=3)),
        write(tmp_path / "other.json", serve_made(2.0, "_x", runs=1)),
    ]
    svg = plotted(*paths, "--out", tmp_path / "all.svg")
    names = ("p50", "p99")
    assert set(groups(svg, "series-")) == {f"series-{p}-{s}" for p in names for s in range(3)}
    counts = groups(svg, "runs-")
    assert counts == {f"runs-{p}-{n}": 1 if n == 3 else 2 for p in names for n in range(4)}
    lines = texts(svg).splitlines()
    for wanted in (
        "ours, 8 req/s: 20 requests in 2 runs",
        "$theirs_1, 2 req/s, at most 3 at once: 20 requests in 2 runs",
        "_x, 2 req/s: 10 requests",
        "p99 of the time to first token, ms",
    ):
        assert wanted in [line.strip() for line in lines]
    # Told apart without colour: no two records share marker and line.
    (legend,) = (g for g in svg.iter(f"{SVG}g") if g.get("id") == "legend_1")
    markers = [use.attrib["{http://www.w3.org/1999/xlink}href"] for use in legend.iter(f"{SVG}use")]
    assert len(set(markers)) == 4


def test_without_requests_there_is_throughput_only(tmp_path: Path) -> None:
    results = ServeResults()
    paths = [write(tmp_path / f"{n}.json", serve_made(n, results=results)) for n in (1, 2)]
    ran = metainfer("bench", "plot", *paths, "--out", str(tmp_path / "x.svg"))
    assert ran.code == 0
    assert ran.err == "no distributions of 1.json, 2.json: measured without --save-detailed\n"
    svg = ET.fromstring((tmp_path / "x.svg").read_text(encoding="utf-8"))
    assert not groups(svg, "share-") and len(groups(svg, "middle-")) == 4


def test_equal_names_get_their_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.json", serve_made()) for name in "ab"]
    names = [r.name for r in read_records([Path(path) for path in paths])]
    assert names == ["ours, 4 req/s (a.json)", "ours, 4 req/s (b.json)"]


@pytest.mark.parametrize("ending", ["svg", "png", "PNG"])
def test_equal_records_give_equal_bytes(tmp_path: Path, ending: str) -> None:
    record = write(tmp_path / "r.json", serve_made(label="µ <&> \u0007 字"))
    pictures = []
    for name in ("a", "b"):
        path = tmp_path / "deep" / f"{name}.{ending}"
        ran = metainfer("bench", "plot", record, "--out", str(path))
        assert (ran.code, ran.out, ran.err) == (0, f"{path}\n", "")
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]
    if ending == "svg":
        assert b"<dc:date>" not in pictures[0]
        assert "µ <&> 字, 4 req/s" in texts(ET.fromstring(pictures[0].decode()))
    else:
        assert pictures[0].startswith(b"\x89PNG")


def test_flags_may_stand_between_records(tmp_path: Path) -> None:
    a, b = (write(tmp_path / f"{n}.json", serve_made(n)) for n in (1, 2))
    ran = metainfer("bench", "plot", a, "--out", str(tmp_path / "x.svg"), b)
    assert (ran.code, ran.out) == (0, f"{tmp_path / 'x.svg'}\n")


def refused(tmp_path: Path, *arguments: str) -> str:
    """The two lines on stderr of a command that fails and leaves nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    ran = metainfer("bench", "plot", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and ran.err.count("\nhint: ") == 1
    assert ran.err.count("\n") == 2
    assert sorted(tmp_path.rglob("*")) == before
    return ran.err


def set_at(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Puts a value at "runs.0.failed"; `...` deletes what is there."""

    def change(made: Any) -> None:
        *way, last = (int(key) if key.isdigit() else key for key in place.split("."))
        for key in way:
            made = made[key]
        if value is ...:
            del made[last]
        else:
            made[last] = value

    return change


@pytest.mark.parametrize(
    ("make", "place", "value", "said"),
    [
        (model_made, "sides.1.tokens_per_s", {}, "has no `sides[1].tokens_per_s.prefill 2048`"),
        (model_made, "works", [], "`works` is not a list that holds something"),
        (model_made, "works.0.ratio", "3", "`works[0].ratio` is not a number"),
        (model_made, "commit", ..., "has no `commit`"),
        (model_made, "machine.cpu", None, "has no `machine.cpu.model`"),
        (model_made, "sides.0.tokens_per_s.decode batch 1.2", float("nan"), "batch 1[2]` is not"),
        (model_made, "sides.0.peak_bytes", 10**400, "`sides[0].peak_bytes` is not a number"),
        (serve_made, "runs.1.requests.3.ttft_s", ..., "has no `runs[1].requests[3].ttft_s`"),
        (serve_made, "runs.0.requests.0.itl_s", [True], "`runs[0].requests[0].itl_s[0]` is not"),
        (serve_made, "runs", {}, "`runs` is not a list"),
        (serve_made, "label", 3, "`label` is not a text"),
        (serve_made, "backend", ..., "is no record of `bench model` or `bench serve`"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    tmp_path: Path, make: Callable[[], dict[str, Any]], place: str, value: Any, said: str
) -> None:
    made = json.loads(json.dumps(make()))
    set_at(place, value)(made)
    assert said in refused(tmp_path, write(tmp_path / "r.json", made))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"sides": [', "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"", "is not JSON"),
        (b"[]", "is no record of"),
        (b"{}", "is no record of"),
    ],
)
def test_files_that_are_no_records(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(data)
    assert said in refused(tmp_path, str(path))


def test_records_that_do_not_go_together(tmp_path: Path) -> None:
    model = write(tmp_path / "m.json", model_made())
    serve = write(tmp_path / "s.json", serve_made())
    said = refused(tmp_path, serve, model)
    assert "m.json is a record of `bench model`" in said and "s.json one of `bench serve`" in said
    assert "gone.json does not exist" in refused(tmp_path, serve, str(tmp_path / "gone.json"))
    assert "33 records; a picture holds 1 to 32" in refused(tmp_path, *[serve] * 33)
    assert "64" in refused(tmp_path, *[model] * 17)


def test_the_flag_that_was_missing_is_named(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.json", serve_made(results=ServeResults()))
    assert "--save-detailed" in refused(tmp_path, plain)
    few = ServeResults(metric_percentiles=(50.0,))
    paths = [write(tmp_path / f"{n}.json", serve_made(n, results=few)) for n in (1, 2)]
    said = refused(tmp_path, *paths)
    assert "1.json holds no p99" in said and "--metric-percentiles" in said
    failed = write(tmp_path / "failed.json", serve_made(failed=10))
    assert "no request succeeded" in refused(tmp_path, failed)


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = write(tmp_path / "r.json", model_made())
    for name in ("x.pdf", "x", "x.svg.gz"):
        assert ".svg, .png" in refused(tmp_path, record, "--out", str(tmp_path / name))
    (tmp_path / "d.svg").mkdir()
    assert "is a directory" in refused(tmp_path, record, "--out", str(tmp_path / "d.svg"))
    assert "is a directory" in refused(tmp_path, record, "--out", str(tmp_path))
    assert "is a directory" in refused(tmp_path, str(tmp_path))
    assert "r.json" in refused(tmp_path, record, "--out", f"{record}/x.svg")
    odd = tmp_path / "odd.svg"
    odd.write_bytes(Path(record).read_bytes())
    assert "is the record itself" in refused(tmp_path, str(odd))
    assert "RECORD is not given" in metainfer("bench", "plot").err

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    old = tmp_path / "old.svg"
    old.write_text("old")
    monkeypatch.setattr(record_module.Path, "replace", full)
    said = refused(tmp_path, record, "--out", str(old))
    assert "no space left on device" in said and "--out" in said
    assert old.read_text() == "old"


def test_without_matplotlib_there_is_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refused(tmp_path, write(tmp_path / "r.json", model_made()))
    assert "pip install 'metainfer[report]'" in said
