"""Starts that were made before run the same code with the same arguments as Triton's own way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from metainfer.kernels.gpu.compilations import Compilations
from metainfer.kernels.triton.launch import JitLauncher
from metainfer.kernels.triton.portable import PtxLauncher
from metainfer.kernels.triton.started import key_of
from tests.compiled.kernels import everything, product
from tests.compiled.test_portable import NotedDriver
from tests.compiled.test_record import ROWS
from tests.fakes.no_gpu import NoGpu, no_gpu

X = torch.zeros(256)
WHOLE = (0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63)
NUMBERS = (*WHOLE, 1.0, 0.5)
OTHERS = (True, False, None, X, X[1:], X[4:], X.bfloat16(), X.byte(), X.byte()[1:], X.long())
GIVEN = (X, X, 5, 2, 3, 2**40, 1.5, True, 0.25, None)


@pytest.fixture
def gpu() -> Iterator[NoGpu]:
    with no_gpu() as made:
        yield made


def launcher(compilations: Compilations | None = None) -> JitLauncher:
    return JitLauncher((9, 0), 132, compilations)


def asked() -> Any:
    """Counts how often Triton is asked for code."""
    return mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run)


def drawn(draw: random.Random) -> tuple[Any, ...]:
    """Arguments of any types that Triton takes for `everything`."""
    tensors = [value for value in OTHERS if isinstance(value, torch.Tensor)]
    rest = [draw.choice((*NUMBERS, *OTHERS)) for _ in range(3)]
    whole = [draw.choice(WHOLE) for _ in range(4)]
    return (draw.choice(tensors), draw.choice(tensors), *whole, *rest, draw.choice(OTHERS))


def test_a_key_holds_all_that_triton_specialises_on() -> None:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(everything.signature, everything.params, backend)
    draw = random.Random(0)
    made = [drawn(draw) for _ in range(3000)]
    # Neighbours differ in one argument alone.
    for arguments in made[:300]:
        for place in range(len(arguments)):
            changed = drawn(draw)
            made.append((*arguments[:place], changed[place], *arguments[place + 1 :]))
    theirs: dict[Any, set[Any]] = {}
    for arguments in (*ROWS, *made):
        for block in (64, 128):
            specialised = tuple(bind(*arguments, BLOCK=block)[1])
            key = key_of(everything, arguments, {"BLOCK": block})
            assert key is not None
            theirs.setdefault(key, set()).add(specialised)
    assert len({one for found in theirs.values() for one in found}) > 1000
    assert all(len(found) == 1 for found in theirs.values())


def test_keys_differ_in_kernel_constants_and_options() -> None:
    keys = [
        key_of(kernel, (X,), named)
        for kernel in (everything, product)
        for named in ({"BLOCK": 64}, {"BLOCK": 32}, {"TWICE": 64}, {"BLOCK": 64, "num_warps": 4})
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(everything, (X, [1]), {}) is None


def test_sizes_do_not_make_new_keys() -> None:
    keys = {key_of(everything, (X[: n % 64], 3 + 2 * n, 16 * n + 32), {}) for n in range(500)}
    assert len(keys) == 1


def test_a_second_start_is_the_first_again_without_asking_triton(gpu: NoGpu) -> None:
    launch = launcher()
    for n in (5, 7):
        with asked() as run:
            launch(everything, (2, 3), X, X, n, *GIVEN[3:], num_warps=2, BLOCK=64)
        assert run.call_count == (n == 5)
        gpu.stream += 1
    first, second = gpu.starts
    assert first.compiled is second.compiled
    assert (first.grid, second.grid) == ((2, 3, 1), (2, 3, 1))
    assert (first.stream, second.stream) == (7, 8)
    assert first.arguments == (X, X, 5, *GIVEN[3:], 64, False)
    assert [*map(id, second.arguments)] == [*map(id, (X, X, 7, *GIVEN[3:], 64, False))]


def test_what_was_compiled_is_counted_once(gpu: NoGpu) -> None:
    compilations = Compilations()
    launch = launcher(compilations)
    for rows in (5, 1, 5, 16, 1):  # which are not specialised
        launch(everything, (1,), X, X, rows, *GIVEN[3:], BLOCK=64)
    launch(everything, (1,), X[1:], X, 5, *GIVEN[3:], BLOCK=64)
    assert compilations.in_warm_up == len(gpu.compiled) == 2
    assert [start.compiled for start in gpu.starts] == [*[gpu.compiled[0]] * 5, gpu.compiled[1]]


def test_the_same_code_as_triton_whatever_comes(gpu: NoGpu) -> None:
    draw, launch = random.Random(1), launcher()
    some = [(drawn(draw), {"BLOCK": draw.choice((64, 128))}) for _ in range(60)]
    for _ in range(300):
        arguments, constants = draw.choice(some)
        launch(everything, (1,), *arguments, **constants)
        everything[(1,)](*arguments, num_warps=4, num_stages=1, **constants)
    ours, theirs = gpu.starts[::2], gpu.starts[1::2]
    assert [start.compiled for start in ours] == [start.compiled for start in theirs]
    assert [[*map(id, start.arguments)] for start in ours] == [
        [*map(id, start.arguments)] for start in theirs
    ]


def test_each_device_has_its_own_code(gpu: NoGpu) -> None:
    launch = launcher()
    for device in (gpu.device, gpu.device + 10_000, gpu.device):
        gpu.device = device
        launch(everything, (1,), *GIVEN, BLOCK=64)
    here, there, again = (start.compiled for start in gpu.starts)
    assert here is again
    assert here is not there


def test_hooks_on_launches_are_called(gpu: NoGpu) -> None:
    launch, hook = launcher(), mock.Mock()
    launch(everything, (1,), *GIVEN, BLOCK=64)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(everything, (1,), *GIVEN, BLOCK=64)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    launch(everything, (1,), *GIVEN, BLOCK=64)
    assert hook.call_count == 1
    assert len(gpu.starts) == 3


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1234"])
def test_an_unknown_triton_is_always_asked(
    gpu: NoGpu, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    launch = launcher()
    with asked() as run:
        for _ in range(3):
            launch(everything, (1,), *GIVEN, BLOCK=64)
    assert run.call_count == len(gpu.starts) == 3


def test_arguments_in_unusual_places_go_to_triton(gpu: NoGpu) -> None:
    launch = launcher()
    for block in (64, 32, 64):
        launch(everything, (1,), *GIVEN, block)  # a constant by place
        launch(everything, (1,), *GIVEN[:-1], maybe_ptr=None, BLOCK=block)  # a value by name
    assert [start.arguments[-2] for start in gpu.starts] == [64, 64, 32, 32, 64, 64]
    assert len(gpu.compiled) == 2


class StartingDriver(NotedDriver):
    """Notes what would be started: function, grid, and the packed numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[int, tuple[int, ...], bytes]] = []

    def enter(self, device: int) -> None:
        pass

    def launch(
        self, function: int, grid: Any, threads: int, shared: int, stream: int, values: bytes
    ) -> None:
        self.started.append((function, grid, values))


def test_code_of_older_gpus_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(device=SimpleNamespace(index=0), device_index=0, cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    driver, compilations = StartingDriver(), Compilations()
    noted: Any = driver
    launch = PtxLauncher((8, 0), 132, noted, compilations)
    calls = (5, 2, 1), (7, 2, 1), (7, 16, 1), (9, 4, 1), (9, 4, 3)
    for _ in range(2):
        for numbers in calls:
            launch(everything, (2,), X, X, *numbers, *GIVEN[5:], num_warps=1, BLOCK=64)
        # Nothing is known of the second turn.
        monkeypatch.setattr("metainfer.kernels.triton.portable.key_of", lambda *_: None)
    assert driver.started[: len(calls)] == driver.started[len(calls) :]
    assert compilations.in_warm_up == len(driver.loaded) == 3
