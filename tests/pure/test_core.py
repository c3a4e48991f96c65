"""Units, log lines, and what a terminal is shown."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator

import pytest

from metainfer.cli import terminal as terminal_module
from metainfer.cli.terminal import Terminal
from metainfer.core.env import VARIABLES, bound_spinning, child_environment, read_environment
from metainfer.core.errors import UserError
from metainfer.core.log import configure
from metainfer.core.units import format_bytes, format_count, format_flops, format_seconds

# ---- units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (159_609_485_896, "159.6 GB"),
        (-1500, "-1.5 kB"),
        (3 * 10**15, "3000.0 TB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
    assert format_flops(count) == f"{text}FLOP".replace("BFLOP", "FLOP")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (12e-6, "12 us"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts() -> None:
    assert format_count(1048576) == "1,048,576"


# ---- environment


def test_only_listed_variables_that_hold_something_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("METAINFER_LOG_LEVEL", "debug")
    monkeypatch.setenv("METAINFER_NO_SUCH", "1")
    assert read_environment() == {"METAINFER_LOG_LEVEL": "debug"}
    child = child_environment(OMP_NUM_THREADS="2")
    assert (child["METAINFER_NO_SUCH"], child["OMP_NUM_THREADS"]) == ("1", "2")


# ---- log lines


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    root = logging.getLogger("metainfer")
    kept = (root.handlers[:], root.level, root.propagate)
    yield logging.getLogger("metainfer.part.of")
    root.handlers[:], root.level, root.propagate = kept


def test_a_log_line_has_time_level_and_part(logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure("info", stream=stream)
    configure("warning", stream=stream)  # replaces the first
    logger.info("not shown")
    logger.warning("shown %d", 7)
    (line,) = stream.getvalue().splitlines()
    assert line.partition(" ")[2] == "warning part.of: shown 7"


def test_json_lines_are_one_object_each(logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure("debug", as_json=True, stream=stream)
    logger.debug("two\nlines")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["logger"]) == ("debug", "metainfer.part.of")
    assert first["message"] == "two\nlines"
    assert "ValueError: why" in second["exception"]


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(UserError, match="log level 'loud' is not one of debug, info"):
        configure("loud")


# ---- terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [0.0]
    monkeypatch.setattr(terminal_module.time, "monotonic", lambda: now_s[0])
    return now_s


def shown(live: bool, clock: list[float], colour: bool = False) -> tuple[Terminal, io.StringIO]:
    err = io.StringIO()
    return Terminal(io.StringIO(), err, colour=colour, live=live), err


def test_what_is_quick_shows_no_progress(clock: list[float]) -> None:
    terminal, err = shown(True, clock)
    with terminal.progress("read") as progress:
        clock[0] = 0.4
        progress.update(5, 5)
    assert err.getvalue() == ""


def test_progress_redraws_one_line_and_removes_it(clock: list[float]) -> None:
    terminal, err = shown(True, clock)
    with terminal.progress("read") as progress:
        for clock[0], done in ((1.0, 10**7), (1.05, 2 * 10**7), (2.0, 10**8)):
            progress.update(done, 2 * 10**8)
    first, second, blank, end = err.getvalue().split("\r")[1:]
    assert first == "read 10.0 of 200.0 MB (5 %, 10 MB/s)"
    assert second == "read 100.0 of 200.0 MB (50 %, 50 MB/s)"
    assert (blank.strip(), len(blank), end) == ("", len(second), "")


def test_what_is_said_meanwhile_has_a_line_of_its_own(clock: list[float]) -> None:
    terminal, err = shown(True, clock)
    with terminal.progress("turns", "turns") as progress:
        clock[0] = 1.0
        progress.update(1, 2)
        progress.say("comparing")
        clock[0] = 2.0
        progress.update(2, 2)
    first = "turns 1 of 2 turns (50 %)"
    assert err.getvalue().startswith(f"\r{first}\r{' ' * len(first)}\rcomparing\n\rturns 2 of 2")


def test_progress_into_a_file_is_a_line_now_and_then(clock: list[float]) -> None:
    terminal, err = shown(False, clock)
    with terminal.progress("turns", "turns") as progress:
        for n in range(1, 13):
            clock[0] = float(n)
            progress.update(n, 12)
    assert err.getvalue() == "turns 5 of 12 turns (41 %)\nturns 10 of 12 turns (83 %)\n"


def test_colour_only_where_it_may_be(clock: list[float]) -> None:
    for colour in (True, False):
        terminal, err = shown(False, clock, colour)
        terminal.error(UserError("wrong", hint="mend"))
        assert ("\x1b[" in err.getvalue()) is colour
        assert "wrong" in err.getvalue()
        assert "mend" in err.getvalue()


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "4000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_idle_threads_give_up_their_core_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    bound_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
