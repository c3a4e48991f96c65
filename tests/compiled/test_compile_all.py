"""Compiling many units: facts of the machine code, the cache of them, failures."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import triton
import triton.language as tl

from metainfer.kernels.triton import compile_all as module
from metainfer.kernels.triton.compile_all import Job, compile_all
from metainfer.kernels.triton.machine_code import MachineCode, matrix_kinds
from metainfer.kernels.triton.record import CompileUnit, unit_of
from tests.compiled.kernels import product


@triton.jit
def ends_the_process(x_ptr, N: tl.constexpr):
    tl.static_assert(N.kill())


class Killer:
    """A constant that ends the process that compiles with it."""

    def kill(self) -> None:
        os._exit(3)

    def __repr__(self) -> str:
        return "Killer()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Killer)

    def __hash__(self) -> int:
        return 0


def unit(dtype: torch.dtype, m: int, kind: object = None, columns: int = 128) -> CompileUnit:
    a = torch.empty(m, 256, dtype=dtype, device="meta")
    options = {"TYPE": kind, "M": m, "N": columns, "num_warps": 4, "num_stages": 2}
    return unit_of(product, (a, a, a.float(), 256), options)[0]


def test_facts_are_read_kept_and_found_again(tmp_path: Path, monkeypatch) -> None:
    brain, eight = unit(torch.bfloat16, 64), unit(torch.uint8, 64, tl.float8e4nv)
    wrong = unit(torch.bfloat16, 16, "no type"), (8, 0)
    kinds = {
        (brain, (8, 0)): ("mma.sync bf16",),
        (brain, (9, 0)): ("wgmma bf16",),
        (brain, (10, 0)): ("tcgen05 f16",),
        (eight, (8, 9)): ("mma.sync e4m3",),
        (eight, (9, 0)): ("wgmma e4m3",),
        (eight, (12, 0)): ("mma.sync e4m3",),
    }
    told = []
    jobs: list[Job] = [*kinds, wrong]
    done = compile_all(jobs, 2, tmp_path, lambda *numbers: told.append(numbers))
    assert told == [(number, 7) for number in range(1, 8)]
    for job, matrix in kinds.items():
        code = done[job]
        assert isinstance(code, MachineCode), code
        assert code.matrix == matrix
        assert code.shared_bytes >= 64 * 64 * 2
        assert 16 < code.registers <= 255
        assert (code.tensor_columns > 0) == (job[1] == (10, 0))
    failure = done[wrong]
    assert isinstance(failure, str)
    assert failure.startswith("AttributeError: ")
    assert "\n" not in failure

    assert len(list(tmp_path.iterdir())) == len(kinds)
    monkeypatch.setattr(module, "_in_processes", lambda jobs, _: [(job, "anew") for job in jobs])
    assert compile_all(jobs, 1, tmp_path) == {**done, wrong: "anew"}
    for kept in tmp_path.iterdir():
        kept.write_text("{", encoding="utf-8")
    assert set(compile_all(jobs, 1, tmp_path).values()) == {"anew"}


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    code = MachineCode(**dict.fromkeys(MachineCode.__dataclass_fields__, 0) | {"matrix": ()})
    monkeypatch.setattr(module, "_in_processes", lambda jobs, _: [(job, code) for job in jobs])
    job = unit(torch.bfloat16, 64), (8, 0)
    assert compile_all([job], 1, tmp_path / "file" / "cache") == {job: code}


def test_other_code_has_another_key(monkeypatch) -> None:
    one, other = unit(torch.bfloat16, 16), unit(torch.bfloat16, 32)
    keys = {
        module.unit_key(one, (8, 0)),
        module.unit_key(one, (8, 9)),
        module.unit_key(other, (8, 0)),
    }
    monkeypatch.setattr(triton, "__version__", "0")
    keys.add(module.unit_key(one, (8, 0)))
    assert len(keys) == 4


def test_a_unit_that_ends_its_process_costs_no_other(tmp_path: Path) -> None:
    killer, _ = unit_of(ends_the_process, (torch.empty(1),), {"N": Killer()})
    right = unit(torch.bfloat16, 16, columns=16)
    jobs: list[Job] = [(killer, (8, 0)), (right, (8, 0))]
    done = compile_all(jobs, 2, tmp_path)
    assert isinstance(done[jobs[1]], MachineCode)
    assert done[jobs[0]] == "the compiler ended its process"


def test_instructions_are_read_from_ptx() -> None:
    scaled = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32"
    lines = {
        f"{scaled}.e4m3.e2m1.f32.ue8m0 {{%r1}}": "mma.sync e4m3xe2m1 block-scaled",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X": "tcgen05 mxf4nvf4"
        " block-scaled",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": "mma.sync tf32",
    }
    for ptx, kind in lines.items():
        assert matrix_kinds(ptx, asks=True) == (kind,)
    assert matrix_kinds("fma.rn.f32", asks=True) == ("emulated",)
    assert matrix_kinds("wgmma.fence.sync.aligned;", asks=False) == ()
