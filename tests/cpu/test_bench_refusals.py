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
    "stages": ("bench", "stages"),
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


NO_BUDGET = "--budget: '{}' is not a number above 0"
ROOM = "--max-model-len 4 is below the {} tokens of the longest sequence"


@pytest.mark.parametrize("verb", ["stages", "paired", "ops"])
@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf"])
def test_a_budget_that_is_none(verb: str, budget: str) -> None:
    assert refused(ALL[verb], f"--budget={budget}") == NO_BUDGET.format(budget)
    assert refused(("verify",), f"--budget={budget}") == NO_BUDGET.format(budget)


@pytest.mark.parametrize(
    ("verb", "flags", "message"),
    [
        ("stages", ("--settings", ""), "a setting is empty"),
        ("paired", ("--b", " "), "a setting is empty"),
        ("quality", ("--a", ""), "a setting is empty"),
        ("profile", ("--setting", ""), "a setting is empty"),
        ("stages", ("--max-model-len", "4"), ROOM.format(1025)),
        ("paired", ("--max-model-len", "4"), ROOM.format(1025)),
        ("quality", ("--max-model-len", "4", "--window-len", "8"), ROOM.format(24)),
        ("profile", ("--max-model-len", "4"), ROOM.format(1025)),
        (
            "stages",
            ("--settings", "tuned", "tuned,--max-num-seqs=2"),
            "--max-num-seqs 2 is below the 8 sequences that run together",
        ),
        (
            "profile",
            ("--max-num-seqs", "7"),
            "--max-num-seqs 7 is below the 8 sequences that run together",
        ),
        ("stages", ("--layers", "9"), "num_hidden_layers 9 is asked of {}, which has 5"),
        ("stages", ("--request-rate", "inf"), "--request-rate: 'inf' is not a number above 0"),
        ("quality", ("--most-kl", "nan"), "--most-kl nan is not a number from 0 on"),
        ("quality", ("--most-kl", "inf"), "--most-kl inf is not a number from 0 on"),
        (
            "quality",
            ("--most-perplexity-rise=-0.1",),
            "--most-perplexity-rise -0.1 is not a number from 0 on",
        ),
        ("quality", ("--least-top1", "99"), "--least-top1 99 is not a share from 0 to 1"),
        ("quality", ("--most-recall-loss=-1",), "--most-recall-loss -1 is not a share from 0 to 1"),
    ],
)
def test_work_that_makes_no_sense(
    verb: str, flags: tuple[str, ...], message: str, model: str
) -> None:
    where = (model, "--load-format", "dummy", "--device", "cpu")
    assert refused(ON_A_MODEL[verb], *where, *flags) == message.format(Path(model).name)


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--text", None, "{}: no such file or directory"),
        ("--text", b"", "{} holds no windows of two tokens or more"),
        ("--text", b'{"source": "a", "text": ""}', "{} holds no windows of two tokens or more"),
        ("--text", b'{"source": "a", "text": 5}', "{}, line 1: no text (str)"),
        ("--text", b"\xff\xfe", "{} is not UTF-8 text"),
        ("--token-ids", b"", "{} holds no windows of two tokens or more"),
        ("--token-ids", b"[1, true]", "{}, line 1: not a list of two or more token ids below 4096"),
        ("--needles", b"", "{} holds no needle that fits into 4096 tokens"),
        (
            "--needles",
            b'{"prompt": "a", "answer": "", "distance": 1}',
            "{}, line 1: its prompt or its answer has no tokens",
        ),
    ],
)
def test_data_that_cannot_be_judged_by(
    flag: str, text: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    if text is not None:
        path.write_bytes(text)
    assert refused(ON_A_MODEL["quality"], flag, str(path)) == message.format(path)


def test_operations_that_there_are_not() -> None:
    assert refused(ALL["ops"], "--ops", "zz*") == "--ops: no operation matches 'zz*'"
    message = refused(ALL["ops"], "--ops", "moe.*", "--part", "attention", "--device", "cpu")
    assert message == "--ops: no operation of part attention matches 'moe.*'"
