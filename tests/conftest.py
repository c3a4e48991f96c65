"""Settings that hold for all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A shared machine may stall at any moment: no example fails for being slow.
settings.register_profile("metainfer", deadline=None)
settings.load_profile("metainfer")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and with them every
# command that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What somebody here once found of the shipped model, or of this machine, changes no test."""
    directory = tmp_path_factory.getbasetemp() / "no verdicts"
    monkeypatch.setattr("metainfer.plan.proof.default_cache", lambda: directory)
    monkeypatch.setattr("metainfer.plan.tuning.default_cache", lambda: directory)
    monkeypatch.setattr("metainfer.plan.comm_record.default_cache", lambda: directory)
    nowhere = Path("/dev/null/verdicts")  # tests change what kernels say: nothing of it is kept
    monkeypatch.setattr("metainfer.kernels.verdict_cache.default_cache", lambda: nowhere)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=3, help="processes that a test kills at random")
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")
