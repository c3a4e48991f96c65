"""What a prefill step costs the host, counted without a GPU: launches, and calls of Python. Up to
thousands of rows the host takes longer than the GPU."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from metainfer.arch.families import read_arch
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.torch_products.shapes import library_shapes
from metainfer.kernels.triton.launch import JitLauncher, Launcher
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.llm.batch import BatchBuilder
from metainfer.llm.made_steps import prefill, step
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.nn.cache import CacheStorage
from metainfer.ops.base import Target
from tests.compiled.test_decode_launches import H200, PLAIN, TorchWork
from tests.fakes.no_gpu import no_gpu
from tests.fakes.shapes_only import build_shapes

ROWS = 4096
RATIOS = [0, 4, 128, 4]
MOST_LAUNCHES = 232
"""And operations of torch, in a step of four layers, the last of which attends for one row."""
MOST_CALLS = 2600
"""Of functions in Python, torch's own left out, in the same step."""


class TritonAlone(JitLauncher):
    """Starts kernels of Triton as on a GPU, and none in CUDA C++, which would need its driver."""

    def cuda(self, *_: Any, **__: Any) -> None:
        pass


class Prefill:
    """A model and its cache on the device "meta", and steps of a prompt from its start."""

    def __init__(self, launch: Launcher) -> None:
        layers = {"num_hidden_layers": len(RATIOS), "compress_ratios": RATIOS}
        arch = read_arch("deepseek-v4-flash", {**layers, "num_hash_layers": 0})
        self._model: DeepseekV4 = build_shapes(
            arch,
            1,
            activations="fp8",
            caches=PLAIN,
            registry=builtin_registry(launch),
            target=Target("cuda", H200),
        )
        places: dict[str, Any] = {"num_slots": 8, "device": torch.device("meta")}
        self._cache = CacheStorage(
            arch, num_blocks=ROWS // 128, formats=PLAIN, draft_rows=0, **places
        )
        self._batch = BatchBuilder(max_blocks=ROWS // 128, **places)

    @torch.inference_mode()
    def run(self) -> None:
        with library_shapes():
            inputs = self._batch.build(step([prefill(ROWS, ROWS)]))
            self._model.forward(inputs, self._cache)


def test_launches() -> None:
    launch = RecordingLauncher(H200, 132)
    model = Prefill(launch)
    with TorchWork() as torch_work:
        model.run()
    made = [*(started.unit.name for started in launch.launches), *torch_work.names]
    assert len(made) <= MOST_LAUNCHES, made


def test_calls_of_python() -> None:
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/torch/" not in file and "/tests/" not in file:
            calls.append(frame.f_code.co_name)

    with no_gpu(H200) as gpu:
        launch = TritonAlone(H200, 132)
        model = Prefill(launch)
        model.run()
        compiled, before = len(gpu.compiled), len(gpu.starts)
        sys.setprofile(note)
        try:
            model.run()
        finally:
            sys.setprofile(None)
        assert len(gpu.compiled) == compiled
        assert len(gpu.starts) - before > 50
    most = sorted(set(calls), key=calls.count, reverse=True)[:20]
    assert len(calls) <= MOST_CALLS, [(name, calls.count(name)) for name in most]
