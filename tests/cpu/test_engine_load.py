"""The life of an engine: what loading refuses, what it can be interrupted by, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from metainfer.arch.tiny import tiny_quantised_config
from metainfer.core.errors import CheckpointError, RequestError, UserError
from metainfer.core.events import FinishEvent, FinishReason
from metainfer.llm.engine import Engine
from metainfer.llm.offline import generate
from metainfer.llm.request import Request, SamplingParams
from metainfer.ops.cache_formats import CacheFormats
from metainfer.plan.ledger import block_bytes, state_bytes
from metainfer.plan.settings import EngineSettings
from metainfer.weights.index import SINGLE_NAME
from tests.fakes.engines import load_engine
from tests.fakes.random_models import RandomModel, random_model

Tensors = dict[str, torch.Tensor]
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ENDLESS = SamplingParams(ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    directory = tmp_path_factory.mktemp("load") / "model"
    return random_model(directory, tiny_quantised_config(), seed=3)


def changed(model: RandomModel, directory: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of the checkpoint with some tensors changed."""
    tensors = load_file(model.directory / SINGLE_NAME)
    change(tensors)
    directory.mkdir()
    save_file(tensors, directory / SINGLE_NAME)
    config = (model.directory / "config.json").read_text(encoding="utf-8")
    (directory / "config.json").write_text(config, encoding="utf-8")
    return directory


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("engine", "load")]


def test_progress_plan_and_what_is_loaded(model: RandomModel) -> None:
    done: list[tuple[int, int]] = []
    plans = []
    engine = Engine.load(
        model.directory,
        EngineSettings(device="cpu", max_model_len=256, max_num_seqs=2, threads=1),
        lambda *progress: done.append(progress),
        on_plan=lambda machine, plan: plans.append((machine, plan, len(done))),
    )
    with engine:
        assert plans == [(engine.machine, engine.plan, 0)]
        assert [d for d, _ in done] == sorted(d for d, _ in done)
        assert {total for _, total in done} == {done[-1][0]}
        assert engine.arch.num_experts == model.arch.num_experts
        plan = engine.plan
        assert engine.limits.max_model_len == plan.max_model_len.value == 256
        caches = CacheFormats(plan.cache_dtype.value, plan.index_cache_dtype.value)
        assert plan.state_bytes.value == state_bytes(engine.arch, 2, caches, draft_rows=0)
        blocks = plan.num_blocks.value * block_bytes(engine.arch, caches)
        assert plan.blocks_bytes.value == blocks


@pytest.mark.parametrize("residency", ["quantised", "expanded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_formats_of_weights_and_activations(model: RandomModel, residency: str, dtype: str) -> None:
    with load_engine(model, dtype=dtype, weights_residency=residency) as engine:
        prompts = [model.tokens(130, seed=1), model.tokens(9, seed=2)]
        together = generate(engine, prompts, SHORT)
        assert [len(result.token_ids) for result in together] == [4, 4]
        assert engine.plan.weights_residency.value == residency


def test_missing_tensors_are_all_listed(model: RandomModel, tmp_path: Path) -> None:
    missing = ("layers.1.attn.wkv.weight", "layers.2.ffn.gate.bias", "head.weight")

    def remove(tensors: Tensors) -> None:
        for name in missing:
            del tensors[name]

    with pytest.raises(CheckpointError) as caught:
        Engine.load(changed(model, tmp_path / "less", remove), EngineSettings(device="cpu"))
    assert "3 missing" in caught.value.message
    assert all(name in caught.value.message for name in missing)
    assert caught.value.hint


def test_a_wrong_table_of_experts_is_refused(model: RandomModel, tmp_path: Path) -> None:
    name = "layers.0.ffn.gate.tid2eid"

    def spoil(tensors: Tensors) -> None:
        tensors[name][100, 0] = model.arch.num_experts

    with pytest.raises(CheckpointError, match=rf"{name} names experts that do not exist"):
        Engine.load(changed(model, tmp_path / "table", spoil), EngineSettings(device="cpu"))
    assert engine_threads() == []


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_no_numbers_are_refused(
    model: RandomModel, tmp_path: Path, code: int
) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["layers.3.attn.wo_b.weight"].view(torch.uint8)[5, 7] = code

    with pytest.raises(UserError, match="not a number") as caught:
        Engine.load(changed(model, tmp_path / "codes", spoil), EngineSettings(device="cpu"))
    assert caught.value.hint


def test_too_little_memory_is_refused_with_amounts_and_a_hint(model: RandomModel) -> None:
    with pytest.raises(UserError, match="does not fit") as caught:
        Engine.load(model.directory, EngineSettings(device="cpu", memory_utilization=1e-9))
    assert "weights" in caught.value.message
    assert caught.value.hint is not None and "--memory-utilization" in caught.value.hint


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("nowhere", "there is no checkpoint directory"),
        ("config.json", "is a file, not a checkpoint directory"),
        ("deepseek-v4-flash", "is the name of a known model"),
    ],
)
def test_what_is_no_checkpoint_directory(model: RandomModel, what: str, sentence: str) -> None:
    path = model.directory / what if what == "config.json" else Path(what)
    with pytest.raises(UserError, match=sentence) as caught:
        Engine.load(path)
    assert caught.value.hint


def test_close_ends_what_runs_and_may_be_called_again(model: RandomModel) -> None:
    engine = load_engine(model)
    for n in range(6):  # more than run at once
        engine.submit(Request(f"r{n}", (5, 6, 7), ENDLESS, time.monotonic()))
    assert engine.events()
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    engine.close()
    assert engine_threads() == []
    ends = [event for event in engine.events() if isinstance(event, FinishEvent)]
    assert sorted(end.request_id for end in ends) == [f"r{n}" for n in range(6)]
    assert {end.reason for end in ends} == {FinishReason.ABORT}
    assert engine.events() == ()  # at once, and for ever
    assert not engine.stats().alive
    engine.abort("r0")
    with pytest.raises(RequestError) as caught:
        engine.submit(Request("late", (5,), SHORT, time.monotonic()))
    assert caught.value.status == 503


def test_an_error_inside_with_closes_the_engine(model: RandomModel) -> None:
    with pytest.raises(ZeroDivisionError), load_engine(model) as engine:
        raise ZeroDivisionError
    assert not engine.stats().alive and engine_threads() == []


def test_ctrl_c_ends_loading_at_once(model: RandomModel) -> None:
    held = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(done: int, total: int) -> None:
        if not held.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            held.wait()  # a load that takes for ever

    with pytest.raises(KeyboardInterrupt):
        Engine.load(model.directory, EngineSettings(device="cpu"), interrupt)
    held.set()
    for thread in threading.enumerate():
        if thread.name == "load":
            thread.join()


INTERRUPTED = """
import os, signal, sys, time
from metainfer.llm.engine import Engine
from metainfer.plan.settings import EngineSettings

def interrupt(done, total):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(3600)

try:
    Engine.load(sys.argv[1], EngineSettings(device="cpu"), interrupt)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_process_whose_load_was_interrupted_ends(model: RandomModel) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(model.directory)],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
