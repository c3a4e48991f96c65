"""An engine that runs the code of an older GPU (--as): what is chosen, started and refused."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from metainfer.arch.families import read_arch
from metainfer.arch.tiny import tiny_quantised_arch
from metainfer.bench.stage import parse_setting
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Gpu, Machine, Unknown
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.gpu.compilations import Compilations
from metainfer.kernels.platform import launcher
from metainfer.kernels.registry import Registry
from metainfer.kernels.triton import portable
from metainfer.kernels.triton.launch import JitLauncher, shared_limit
from metainfer.kernels.triton.portable import Loaded, PtxLauncher
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.kernels.tune_record import Found
from metainfer.llm.engine import load_model
from metainfer.ops.base import Target
from metainfer.ops.linear import DenseCase, Fp8RowsCase
from metainfer.plan.build import CPU, build_plan, choose_target
from metainfer.plan.plan import Origin
from metainfer.plan.settings import EngineSettings
from metainfer.plan.tuning import Tuning, tuned_kernels
from tests.fakes.machines import GIB, make_machine

H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)
A100 = Gpu("NVIDIA A100", (8, 0), 80 * GIB, 79 * GIB)
ADA = Target("cuda", (8, 9))


class NotedDriver:
    """Notes what would be started."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []  # (function, stream)

    def enter(self, device: int) -> None:
        pass

    def launch(self, function: int, grid: Any, threads: int, shared: int, stream: int, *_: Any):
        self.started.append((function, stream))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> NotedDriver:
    """A machine whose torch sees an H200, and its driver."""
    driver = NotedDriver()
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(portable, "Driver", lambda: driver)
    return driver


def registry_as(capability: tuple[int, int]) -> Registry:
    return builtin_registry(RecordingLauncher(capability, 132, portable=True))


def settings(**flags: Any) -> EngineSettings:
    return EngineSettings(code_for="sm_89", **flags)


def chosen(machine: Machine, registry: Registry, **flags: Any):
    return choose_target(machine, tiny_quantised_arch(), settings(**flags), registry.capabilities)


def test_the_flag_is_read_and_names_are_checked() -> None:
    arch = read_arch("deepseek-v4-flash")
    setting = parse_setting("tuned,--as=sm_89", EngineSettings(), arch)
    assert (setting.stage, setting.engine.code_for) == ("tuned", "sm_89")
    with pytest.raises(UserError, match="'8.9' is no GPU's code name"):
        parse_setting("tuned,--as=8.9", EngineSettings(), arch)
    for name in ("sm_90", "sm_100", "sm_86"):
        with pytest.raises(UserError, match=f"no code for {name} runs on other GPUs") as caught:
            EngineSettings(code_for=name)
        assert caught.value.hint == "take sm_80 or sm_89"


def test_which_launcher_is_made(gpu: NotedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    native, older = launcher(), launcher("sm_89")
    assert isinstance(native, JitLauncher) and isinstance(older, PtxLauncher)
    assert (native.capability, native.portable) == ((9, 0), False)
    assert (older.capability, older.multiprocessors, older.portable) == ((8, 9), 132, True)
    assert shared_limit(older.capability) == 99 * 1024
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launcher("sm_89") is None


def test_an_engine_starts_that_code(gpu: NotedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what `load_model` hands to the plan."""
    seen: list[Any] = []

    def stop(machine: Machine, arch: Any, flags: EngineSettings, able: Any, *_: Any) -> None:
        seen.append((flags.code_for, able))
        raise UserError("seen", hint="")

    monkeypatch.setattr("metainfer.llm.engine.choose_target", stop)
    registries: list[Any] = []

    def made(launch: Any) -> Registry:
        registries.append(launch)
        return registry_as(launch.capability)

    monkeypatch.setattr("metainfer.llm.engine.builtin_registry", made)
    for flags in ({}, {"code_for": "sm_89"}):
        with pytest.raises(UserError, match="seen"):
            load_model("deepseek-v4-flash", EngineSettings(load_format="dummy", **flags))
    assert [type(launch) for launch in registries] == [JitLauncher, PtxLauncher]
    assert [code for code, _ in seen] == [None, "sm_89"]


def test_the_plan_is_that_of_the_code() -> None:
    machine, registry = make_machine(gpus=(A100, H200)), registry_as((8, 9))
    able = chosen(machine, registry)
    assert able.target == ADA
    made = build_plan(machine, tiny_quantised_arch(), settings(), able)
    assert (made.device.value, made.cuda_graphs.value) == ("cuda:1", "on")  # an A100 is older
    assert (made.code_for.value, made.code_for.origin) == ("sm_89", Origin.FLAG)
    assert made.code_for.reason.startswith("given with --as; NVIDIA H200 translates it from PTX")
    assert made.tuned_kernels.value == "off"
    native = build_plan(make_machine(), tiny_quantised_arch(), EngineSettings(device="cpu"),
                        registry.capabilities(CPU))  # fmt: skip
    assert (native.code_for.value, native.code_for.origin) == ("native", Origin.DEFAULT)


def test_what_another_gpu_s_libraries_do_is_not_bound() -> None:
    """Neither where kernels run nor on paper, so that both choose the same."""
    registry = registry_as((8, 9))
    able = registry.capabilities(ADA)
    assert not any("torch" in backends for backends in able.backends.values())
    for op, case in (
        ("linear.dense", DenseCase(4096, 4096)),
        ("linear.fp8_rows", Fp8RowsCase(4096, 4096)),
    ):
        assert registry.bind(op, case, ADA).backend in ("cuda", "triton")
    native = builtin_registry(RecordingLauncher((8, 9), 132)).capabilities(ADA)
    assert "torch" in native.backends["linear.dense"]


@pytest.mark.parametrize(
    ("gpus", "flags", "sentence"),
    [
        ((H200,), {"device": "cpu"}, "a CPU does not run the code of sm_89"),
        ((), {}, "--as sm_89 asks for a GPU, and none is known here (none is listed)"),
        (Unknown("no driver"), {}, "--as sm_89 asks for a GPU, and none is known here (no driver)"),
        (Unknown("no driver"), {"device": "cuda"}, "--as sm_89 asks for a GPU, and none is known"),
        ((A100,), {}, "NVIDIA A100 is older than sm_89 and cannot run its code"),
        ((H200, A100), {"device": "cuda:1"}, "NVIDIA A100 is older than sm_89"),
        ((H200,), {"device": "cuda:1"}, "--device cuda:1: there are 1 GPUs"),
    ],
)
def test_refusals(gpus: Any, flags: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        chosen(make_machine(gpus=gpus), registry_as((8, 9)), **flags)
    assert caught.value.message.startswith(sentence) and caught.value.hint


def test_times_of_native_code_do_not_count() -> None:
    tuning = Tuning(3, "3 operations were tuned")
    switch = tuned_kernels(settings(), tuning)
    assert (switch.value, switch.origin) == ("off", Origin.DEFAULT)
    plan: Any = SimpleNamespace(tuned_kernels=switch)
    tuned = Found().bound(plan, ADA)
    assert tuned.note == "times are kept of native code alone"
    with pytest.raises(UserError, match="--tuned-kernels: times are kept of native code"):
        tuned_kernels(settings(tuned_kernels=True), tuning)


def test_starts_go_to_the_current_stream_and_are_counted_once(
    gpu: NotedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph captures what is started on the stream of the capture."""
    streams = [SimpleNamespace(device=SimpleNamespace(index=0), cuda_stream=n) for n in (5, 6)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[0])
    unit = SimpleNamespace(name="scores", facts=lambda: {"N": "is 1"})
    monkeypatch.setattr(portable, "unit_of", lambda *_: (made, ()))
    monkeypatch.setattr(portable, "load", lambda *_: Loaded(77, struct.Struct(""), 128, 0))
    made = _Hashed(unit)
    compilations = Compilations()
    launch = launcher("sm_89", compilations)
    assert launch is not None
    kernel = SimpleNamespace(params=[], arg_names=[])
    launch(kernel, (1,))
    streams.reverse()
    launch(kernel, (1,))
    assert gpu.started == [(77, 5), (77, 6)]
    assert (compilations.in_warm_up, compilations.in_service) == (1, 0)


class _Hashed:
    """A unit as a key."""

    def __init__(self, unit: SimpleNamespace) -> None:
        self.name, self.facts = unit.name, unit.facts
        self.runtime_places = ()
