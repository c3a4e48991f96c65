"""How the tests of a GPU are run: as the code of another GPU, in parts, or one case of each kernel.

`pytest tests/gpu --as sm_89` runs what a card of that capability would run, from its PTX.
"""

from __future__ import annotations

from pathlib import Path

import pytest

WHOLE_MODELS = ("test_engine_gpu.py", "test_graphs.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as", dest="as_target", help="run the code for this GPU, such as sm_89")
    parser.addoption("--shard", default="0/1", help="every n-th test, such as 2/8")
    parser.addoption(
        "--one-case",
        action="store_true",
        help="one case of each kernel and few inputs, no whole model",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (config.getoption("one_case") and collection_path.name in WHOLE_MODELS) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[place::count]
