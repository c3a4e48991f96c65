"""What verbs that measure refuse before they load or measure anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metainfer.arch.tiny import tiny_config
from metainfer.bench.stages_settings import BenchResults
from metainfer.cli.bench_results import place_of, report
from metainfer.cli.terminal import Terminal
from tests.fakes.command import metainfer

PAIR = ("--a", "tuned", "--b", "tuned")
ON_A_MODEL = {
    "stages": ("bench", "stages", "--settings", "tuned"),
    "paired": ("bench", "paired", *PAIR),
    "quality": ("bench", "quality", *PAIR),
    "profile": ("profile",),
}
ALL = {
    **ON_A_MODEL,
    "ops": ("bench", "ops"),
    "model": ("bench", "model"),
    "serve": ("bench", "serve"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(tiny_config()))
    return str(directory)


def refused(verb: tuple[str, ...], *flags: str) -> str:
    """The error of a verb that began nothing."""
    ran = metainfer(*verb, *flags)
    assert (ran.code, ran.out) == (2, ""), ran.err
    said = ran.err.splitlines()
    assert said[0].startswith("error: "), said
    assert len(said) == 1 or said[1].startswith("hint: "), said
    return said[0].removeprefix("error: ")


@pytest.mark.parametrize("verb", ALL)
def test_a_record_that_cannot_be_written(verb: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    (tmp_path / "taken.json").mkdir()
    before = sorted(tmp_path.iterdir())
    save = ("--save-result", "--result-dir")
    for directory in (file, file / "deep"):
        message = refused(ALL[verb], *save, str(directory))
        assert message == f"--result-dir: nothing can be written in {file}: not a directory"
    message = refused(ALL[verb], *save, str(tmp_path), "--result-filename", "taken.json")
    assert message == f"--result-dir: {tmp_path / 'taken.json'} is a directory"
    assert sorted(tmp_path.iterdir()) == before


def test_figures_are_told_where_writing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    results = BenchResults(save_result=True, result_dir=tmp_path / "new")
    path = place_of(results, "record")
    assert path == tmp_path / "new" / "record.json"
    assert not path.parent.exists(), "looking leaves nothing behind"
    (tmp_path / "new").write_text("came in between")
    terminal = Terminal.standard({})
    with pytest.raises(FileExistsError):
        report(terminal, results, {"rate": 5}, path, lambda made: f"rate {made['rate']}")
    assert capsys.readouterr().out == "rate 5\n"
