"""The C kernels: how they are built, what happens where they cannot be, and codes that are rare.
That they fulfil their contracts is tested with those of all other backends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metainfer.kernels import builtin
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.cpu import BACKENDS as CPU_BACKENDS
from metainfer.kernels.cpu.unpack import Fp4Weights
from metainfer.kernels.native import native_backends
from metainfer.kernels.native.backend import FEW_ROWS, MOST_ELEMENTS
from metainfer.kernels.native.library import Library, load_library
from metainfer.kernels.native.moe import unpack_fp4
from metainfer.kernels.reference import BACKENDS as REFERENCE_BACKENDS
from metainfer.kernels.reference.formats import decode_rows
from metainfer.kernels.registry import Registry
from metainfer.ops.attention import AttentionCase
from metainfer.ops.base import Target
from metainfer.ops.catalogue import OPS
from metainfer.ops.hc import HyperCase
from metainfer.ops.linear import Fp8BlockCase
from metainfer.ops.moe import ExpertsCase

CPU = Target("cpu")
BUILT = load_library()
needs_compiler = pytest.mark.skipif(isinstance(BUILT, str), reason=str(BUILT))


def compiler(directory: Path, script: str) -> Path:
    """A directory with a `cc` that is `script`."""
    directory.mkdir()
    path = directory / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return directory


def test_without_a_compiler_torch_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = load_library(tmp_path / "cache")
    assert isinstance(reason, str) and "no C compiler" in reason
    registry = Registry((*native_backends(reason), *CPU_BACKENDS, *REFERENCE_BACKENDS))
    for op, contract in OPS.items():
        for case in contract.small_cases:
            assert registry.bind(op, case, CPU).backend in ("cpu", "reference")
            said = dict(registry.explain(op, case, CPU)).get("native")
            assert said is None or said.reason == reason


def test_slower_steps_are_no_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builtin, "load_library", lambda: "there is no C compiler")
    builtin.builtin_registry()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "there is no C compiler" in record.message


def test_a_compiler_that_fails_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(compiler(tmp_path / "bin", "echo no such flag >&2; exit 1")))
    reason = load_library(tmp_path / "cache")
    assert isinstance(reason, str) and reason.endswith("cc failed: no such flag")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interruption_ends_all_that_compiles_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler starts others, which write files of their own; here it interrupts whoever
    waits for it, and its child would be seen to go on."""
    child, going = tmp_path / "child", tmp_path / "going"
    script = f"touch $TMPDIR/cc1.s\n(echo; sleep 2; touch {going}) >{child} &\n"
    script += "kill -INT $PPID; sleep 60"
    monkeypatch.setenv("PATH", f"{compiler(tmp_path / 'bin', script)}:{os.environ['PATH']}")
    stale = tmp_path / "cache" / "build-killed"
    stale.mkdir(parents=True)
    stale.parent.chmod(0o700)
    os.utime(stale, (0, 0))
    with pytest.raises(KeyboardInterrupt):
        load_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    time.sleep(2.5)
    assert not going.exists()


def test_a_compiler_that_writes_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(compiler(tmp_path / "bin", "exit 0")))
    reason = load_library(tmp_path / "cache")
    assert isinstance(reason, str) and "cannot be built or loaded" in reason


def test_a_compiler_whose_words_are_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(compiler(tmp_path / "bin", "printf '\\377no' >&2; exit 1")))
    reason = load_library(tmp_path / "cache")
    assert isinstance(reason, str) and reason.endswith("cc failed: \ufffdno")


@needs_compiler
def test_a_compiler_that_is_mended_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    path = compiler(tmp_path / "bin", "exit 0")
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    assert isinstance(load_library(tmp_path / "cache"), str)
    assert list((tmp_path / "cache").iterdir()) == []
    (path / "cc").write_text(f'#!/bin/sh\nexec {working} "$@"\n')
    assert isinstance(load_library(tmp_path / "cache"), Library)


@needs_compiler
def test_a_library_that_was_cut_short_is_compiled_again(tmp_path: Path) -> None:
    # In a process of its own: loading such a file ends in SIGBUS, not in an error.
    script = "from pathlib import Path; from metainfer.kernels.native.library import load_library\n"
    script += f"print(type(load_library(Path({str(tmp_path)!r}))).__name__)"
    assert isinstance(load_library(tmp_path), Library)
    (built,) = tmp_path.iterdir()
    whole = built.read_bytes()
    damaged = tmp_path / "damaged"
    damaged.write_bytes(whole[: len(whole) // 4])
    damaged.replace(built)  # a new file: the old one is mapped here
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Library\n")
    assert built.stat().st_size > len(whole) // 2


@needs_compiler
def test_a_cache_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    reason = load_library(tmp_path / "cache")
    assert isinstance(reason, str) and "may be written by other users" in reason
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert isinstance(load_library(tmp_path / "file" / "cache"), str)


@needs_compiler
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load_library(tmp_path / "cache"), Library)
    (built,) = (tmp_path / "cache").iterdir()
    before = built.stat()
    assert isinstance(load_library(tmp_path / "cache"), Library)
    assert built.stat() == before


@needs_compiler
def test_large_matrices_are_left_to_all_threads() -> None:
    registry = builtin_registry()
    side = 1024
    assert side * side == MOST_ELEMENTS
    for case, backend in (
        (Fp8BlockCase(side, side), "native"),
        (Fp8BlockCase(2 * side, side), "cpu"),
    ):
        assert registry.bind("linear.fp8_block", case, CPU).backend == backend
    assert registry.bind("hc.mix", HyperCase(4, 16384), CPU).backend == "cpu"
    experts = ExpertsCase(256, 6, 4096, 2048, 10.0)
    assert registry.bind("moe.experts", experts, CPU).backend == "cpu"


@needs_compiler
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_every_fp8_code_and_every_phase_of_the_columns(rows: int) -> None:
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
    for columns in (1, 3, 16, 31, 254):
        case = Fp8BlockCase(len(codes), columns, dtype="float32")
        weight = codes.roll(columns).unsqueeze(1).repeat(1, columns)
        scale = torch.full((-(-len(codes) // 128), -(-columns // 128)), 120, dtype=torch.uint8)
        x_TI = torch.eye(columns)[:1].repeat(rows, 1)
        kernel = builtin_registry().bind("linear.fp8_block", case, CPU)
        assert kernel.backend == "native"
        y_TO = kernel.run(kernel.prepare(weight.view(torch.float8_e4m3fn), scale), x_TI)
        expected = weight[:, 0].view(torch.float8_e4m3fn).float() * 2.0**-7
        assert torch.equal(y_TO, expected.expand(rows, -1))


@needs_compiler
@pytest.mark.parametrize("byte", [0, 1, 100, 127, 230])
def test_fp4_experts_at_every_size_of_scale(byte: int) -> None:
    case = ExpertsCase(4, 2, 32, 64, 1e30, "fp4_group", dtype="float32")
    generator = torch.Generator().manual_seed(byte)

    def matrix(rows: int, columns: int, scale: int) -> tuple[torch.Tensor, torch.Tensor]:
        packed = torch.randint(0, 256, (4, rows, columns // 2), generator=generator)
        scales = torch.full((4, rows, columns // 32), scale, dtype=torch.uint8)
        return packed.to(torch.uint8), scales

    weights = matrix(64, 32, 127), matrix(32, 64, byte), matrix(64, 32, 127)
    x_TD = torch.randn(3, 32, generator=generator)
    ids_TK = torch.tensor([[0, 3], [3, 1], [2, 3]])
    shares_TK = torch.rand(3, 2, generator=generator)
    results = []
    for backend in ("native", "reference"):
        kernel = builtin_registry().bind("moe.experts", case, CPU, f"*={backend}")
        results.append(kernel.run(kernel.prepare(*weights), x_TD, ids_TK, shares_TK))
    ours, theirs = results
    assert theirs.isfinite().all() and theirs.abs().max() > 0
    torch.testing.assert_close(ours / theirs.abs().max(), theirs / theirs.abs().max())


@needs_compiler
def test_fp4_for_many_rows_is_unpacked_to_the_same_numbers() -> None:
    """Every pair of codes at every scale that is not refused, several experts and one of them."""
    assert isinstance(BUILT, Library)
    packed = torch.arange(256).to(torch.uint8).expand(241, 256).contiguous().view(torch.int8)
    scales = torch.arange(241).to(torch.uint8).unsqueeze(1).repeat(1, 16)
    for weights in (Fp4Weights(packed, scales), Fp4Weights(packed, scales).of(7)):
        ours, theirs = unpack_fp4(BUILT, weights), weights.unpack()
        assert theirs.isfinite().all()
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@needs_compiler
@pytest.mark.parametrize("rows", [2, FEW_ROWS + 1])
def test_experts_kept_in_parts_are_added_up(rows: int) -> None:
    case = ExpertsCase(3, 2, 1024, 640, 5.0, "fp4_group", dtype="float32")
    generator = torch.Generator().manual_seed(4)

    def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        packed = torch.randint(0, 256, (3, rows, columns // 2), generator=generator)
        scales = torch.randint(118, 122, (3, rows, columns // 32), generator=generator)
        return packed.to(torch.uint8), scales.to(torch.uint8)

    weights = matrix(640, 1024), matrix(1024, 640), matrix(640, 1024)
    native = {b.op: b for b in native_backends(BUILT)}["moe.experts"]
    prepared = native.prepare(case, *weights)
    assert prepared.parts > 1
    inputs = (
        torch.randn(rows, 1024, generator=generator),
        torch.tensor([[0, 2], [2, 1]]).repeat(rows, 1)[:rows],
        torch.rand(rows, 2, generator=generator),
    )
    reference = builtin_registry().bind("moe.experts", replace(case), CPU, "*=reference")
    theirs = reference.run(reference.prepare(*weights), *inputs)
    torch.testing.assert_close(native.run(case, prepared, *inputs), theirs, rtol=1e-4, atol=1e-2)


@needs_compiler
def test_every_code_at_every_scale_is_read_exactly() -> None:
    """A row that sees one key gives that key: the sinks weigh nothing. Scales from the smallest on,
    up to where codes are no longer finite."""
    case = AttentionCase(1, 512, 1, window_format="v4_fp8")
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[(codes & 127) != 127]
    kernel = builtin_registry().backends("attention.sparse_decode")["native"]
    assert kernel.eligible(case, CPU)
    for first in range(0, 240, FEW_ROWS):
        ring = torch.zeros(FEW_ROWS, 592, dtype=torch.uint8)
        ring[:, :448] = codes[torch.arange(448) % len(codes)]
        ring[:, 448:576] = torch.randn(FEW_ROWS, 64).bfloat16().view(torch.uint8)
        ring[:, 576:583] = torch.arange(first, first + FEW_ROWS).to(torch.uint8).unsqueeze(1)
        q_THD = torch.zeros(FEW_ROWS, 1, 512)
        rows_TW = torch.arange(FEW_ROWS).unsqueeze(1)
        float_case = replace(case, dtype="float32")
        out_THD = kernel.run(float_case, q_THD, ring, rows_TW, torch.full((1,), -torch.inf))
        assert torch.equal(out_THD.squeeze(1), decode_rows("v4_fp8", ring))
