"""Whoever starts kernels makes the GPU of the plan its own first: the current GPU is a thread's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from metainfer.arch.tiny import tiny_config
from metainfer.core.errors import UserError
from metainfer.kernels import platform as platforms
from metainfer.kernels.gpu.current import use_device
from metainfer.llm import threads
from metainfer.llm.engine import Engine
from metainfer.plan.settings import EngineSettings
from tests.fakes.random_models import random_model


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two GPUs: which one became the current one, in order."""
    set_to: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    return set_to


def test_the_gpu_of_a_name_becomes_the_current_one(current: list[int]) -> None:
    for name in ("cpu", "cuda", "cuda:1", "cuda:0"):
        use_device(name)
    assert current == [1, 0]
    with pytest.raises(UserError, match="torch sees 2 GPUs here, and none is cuda:2"):
        use_device("cuda:2")


def test_every_thread_of_an_engine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    began = threading.Event()

    def note(name: str) -> None:
        thread = threading.current_thread()
        told.append(("main" if thread is threading.main_thread() else thread.name, name))
        if thread.name == "engine":
            began.set()

    monkeypatch.setattr(threads, "use_device", note)
    model = random_model(tmp_path / "model", tiny_config())
    settings = EngineSettings(device="cpu", threads=1, max_model_len=256, max_num_seqs=2)
    with Engine.load(model.directory, settings):
        assert began.wait(10)
    assert [thread for thread, _ in told] == ["main", "load", "load", "engine"]
    assert {name for _, name in told} == {"cpu"}


def test_a_platform_is_that_of_the_gpu_named(
    current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of the card is asked after that card became the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9 - 3 * current[-1]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: f"card {current[-1]}")
    monkeypatch.setattr(platforms, "builtin_registry", lambda: "registry")
    here = platforms.platform("cuda:1")
    assert (here.device, here.name, str(here.target)) == ("cuda", "card 1", "cuda:sm_86")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' is no device"):
        EngineSettings(device=name)
