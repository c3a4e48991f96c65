"""Settings that hold for all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A shared machine may stall at any moment: no example fails for being slow.
settings.register_profile("metainfer", deadline=None)
settings.load_profile("metainfer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")
