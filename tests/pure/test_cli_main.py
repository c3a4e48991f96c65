"""The command line's frame: verbs, flags, exit codes and sentences."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest

from metainfer import __version__
from metainfer.cli import main as main_module
from metainfer.cli.main import VERBS
from metainfer.cli.verb import Verb
from metainfer.core.errors import UserError
from tests.fakes.command import metainfer


def test_version() -> None:
    for arguments in (["version"], ["--version"], ["-V"]):
        ran = metainfer(*arguments)
        assert (ran.code, ran.out, ran.err) == (0, f"metainfer {__version__}\n", "")
    as_json = metainfer("version", "--json")
    assert json.loads(as_json.out) == {"version": __version__}


def test_nothing_given_shows_the_verbs_and_fails() -> None:
    ran = metainfer()
    assert (ran.code, ran.out) == (2, "")
    assert all(f"  {verb} " in ran.err for verb in VERBS)
    assert metainfer("help").out == ran.err


def test_help_of_a_group_lists_its_verbs() -> None:
    ran = metainfer("weights", "--help")
    assert (ran.code, ran.err) == (0, "")
    assert [line.split()[:2] for line in ran.out.splitlines()] == [
        ["weights", "synth"],
        ["weights", "check"],
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (["sevre"], "there is no verb 'sevre'", "did you mean `metainfer serve`?"),
        (["weights", "chekc"], "there is no verb 'weights chekc'", "`metainfer weights check`?"),
        (["xyzzy"], "there is no verb 'xyzzy'", "hint: metainfer --help lists all verbs"),
        (["weights"], "metainfer weights needs one of: weights synth, weights check", ""),
        (["bench"], "metainfer bench needs one of: bench serve, bench model", ""),
        (["serve", "--prot", "1"], "metainfer serve has no flag --prot", "did you mean --port?"),
        (["serve", "--max_model_len=8"], "has no flag --max_model_len", "spelled --max-model-len"),
        (["serve", "--swap-space", "4"], "has no flag --swap-space", "leave it out"),
        (["serve", "--dp-size", "2"], "has no flag --dp-size", "start one server per replica"),
        (["version", "more"], "does not know what to do with 'more'", "--help shows what it takes"),
        (["serve", "--max-model-len"], "--max-model-len: expected one argument", "--help"),
        (["serve", "--max-model-len", "many"], "--max-model-len", "--help"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs 0 is below 1", ""),
        (["serve", "--device", "tpu"], "--device", ""),
        # Before a model is looked for, let alone loaded.
        (["run", "nosuch", "-p", "x", "--top-p", "2"], "--top-p must be above 0 and at most 1", ""),
        (["chat", "nosuch", "--max-tokens", "0"], "--max-tokens must be at least 1", ""),
        (["weights", "synth"], "DIRECTORY", "metainfer weights synth --help describes"),
        (["bench", "paired", "--b", "tuned"], "--a is not given", "metainfer bench paired --help"),
        (["bench", "model", "--rounds", "0"], "--rounds must be at least 1", ""),
    ],
)
def test_mistakes_get_a_sentence_and_a_hint(arguments: list[str], sentence: str, hint: str) -> None:
    ran = metainfer(*arguments)
    assert (ran.code, ran.out) == (2, "")
    error, _, rest = ran.err.partition("\n")
    assert error.startswith("error: ")
    assert sentence in error
    assert hint in rest


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (UserError("it is wrong", hint="mend it"), 2, "error: it is wrong\nhint: mend it\n"),
        (
            OSError(errno.EACCES, "Permission denied", "/x"),
            2,
            "error: /x: permission denied\n",
        ),
        (OSError(errno.ENOSPC, "No space left"), 2, "refused: no space left"),
        (MemoryError(), 2, "error: memory did not suffice: the system gave no more\n"),
        (RuntimeError("can't allocate memory: 5 bytes\nmore"), 2, "suffice: can't allocate memory"),
        (ZeroDivisionError("by nought"), 70, "hint: this is a bug in metainfer"),
    ],
)
def test_exit_codes_of_what_a_verb_raises(
    raised: Exception, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> int:
        raise raised

    monkeypatch.setattr(main_module, "load_verb", lambda name: Verb(name, "Fail", (), run))
    ran = metainfer("version")
    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err
    assert ("Traceback" in ran.err) == (code == 70)


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "metainfer", "serve", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (141, b"")
