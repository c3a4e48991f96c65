"""What kernels said is kept for the same sources and question; waiting for them is told."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from metainfer.cli import terminal as terminal_module
from metainfer.cli.terminal import Terminal
from metainfer.kernels import verdict_cache
from metainfer.kernels.verdict_cache import files_in, keep, key_of, read_kept


def test_what_is_kept_comes_back_for_its_key_alone(tmp_path: Path):
    key = key_of(("glm-5.3", "sm_89"))
    assert key == key_of(("glm-5.3", "sm_89")) and read_kept("glm", key, tmp_path) is None
    keep("glm", key, {"1": [True]}, tmp_path)
    assert read_kept("glm", key, tmp_path) == {"1": [True]}
    assert read_kept("glm", key_of(("glm-5.3", "sm_90")), tmp_path) is None
    keep("glm", "new", 7, tmp_path)  # in place of what was there
    assert read_kept("glm", key, tmp_path) is None and len(list(tmp_path.iterdir())) == 1


def test_sources_and_packages_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    before = key_of(())
    monkeypatch.setattr(verdict_cache, "_version", lambda name: "9.9")
    assert key_of(()) != before
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "one.py").write_text("a = 1")
    monkeypatch.setattr(verdict_cache, "_PACKAGE", tmp_path)
    first = key_of(())
    (tmp_path / "ops" / "one.py").write_text("a = 2")
    assert key_of(()) != first
    assert files_in(tmp_path / "ops") and files_in(tmp_path / "nowhere") == ""


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[1]", b'{"key": 3}', b"[" * 10**5])
def test_a_broken_file_is_nothing(content: bytes, tmp_path: Path):
    keep("glm", "key", 1, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert read_kept("glm", "key", tmp_path) is None


def test_where_nothing_can_be_kept_nothing_fails():
    keep("glm", "key", 1, Path("/dev/null/verdicts"))
    assert read_kept("glm", "key", Path("/dev/null/verdicts")) is None


class AtOnce:
    """A timer whose time has come when it starts."""

    asked_s: float

    def __init__(self, seconds: float, function) -> None:
        AtOnce.asked_s, self._function = seconds, function

    def start(self) -> None:
        self._function()

    def cancel(self) -> None: ...

    def join(self) -> None: ...


def waited(live: bool) -> str:
    err = io.StringIO()
    with Terminal(io.StringIO(), err, colour=False, live=live).waiting("asking"):
        pass
    return err.getvalue()


def test_waiting_is_told_and_the_line_goes(monkeypatch: pytest.MonkeyPatch):
    before = threading.active_count()
    assert waited(True) == waited(False) == "" and threading.active_count() <= before
    monkeypatch.setattr(terminal_module.threading, "Timer", AtOnce)
    assert waited(False) == "asking ...\n" and AtOnce.asked_s == 5.0
    assert waited(True) == "\rasking ...\r" + " " * 10 + "\r" and AtOnce.asked_s == 0.5
