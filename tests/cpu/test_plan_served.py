"""`--plan FILE`, from the file of `metainfer plan` to an engine that answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metainfer.llm.engine import Engine
from metainfer.plan.plan import Origin
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import pebble_dir
from tests.fakes.command import metainfer

BOX = "h200-x1"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    asked = ("plan", "--machine", BOX, "--workload", "input=96,output=32,concurrency=2")
    assert metainfer(*asked, "-o", str(path)).code == 0
    return str(path)


def test_the_engine_is_what_was_planned(file: str, caplog: pytest.LogCaptureFixture) -> None:
    with Engine.load(pebble_dir(), EngineSettings(plan=file, threads=1)) as engine:
        plan, limits = engine.plan, engine.limits
    assert (limits.max_model_len, limits.max_num_seqs) == (128, 2)
    assert plan.max_model_len.origin is plan.max_num_batched_tokens.origin is Origin.FILE
    assert "which this machine is not" in caplog.text


def test_the_command_takes_it(file: str) -> None:
    asked = ("run", "--prompt", "Hello", "--threads", "1", "--temperature", "0", "--json")
    ran = metainfer(*asked, "--plan", file, "--max-tokens", "3")
    assert ran.code == 0 and json.loads(ran.out)["usage"]["completion_tokens"] == 3
    refused = metainfer(*asked, "--plan", file, "-tp", "2")
    assert refused.code == 2 and "--tensor-parallel-size 2 contradicts the layout" in refused.err
