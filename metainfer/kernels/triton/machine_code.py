"""What the machine code of a compiled unit is like, read from what the compiler left."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from metainfer.core.errors import MetainferError

TENSOR_MEMORY_COLUMNS = 512
"""Columns of tensor memory of a multiprocessor of sm_100."""

_MATRIX_INSTRUCTION = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)([\w.:]*)")
_OPERAND = re.compile(r"\.(bf16|f16|tf32|e4m3|e5m2|e2m1|s8|u8|f64)\b")
_KIND = re.compile(r"\.kind::(\w+)")
_DOT = re.compile(r"\b(?:tt\.dot(?:_scaled)?|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Attributes:
    shared_bytes: shared memory of a block.
    tensor_columns: columns of tensor memory of a block.
    registers: 32-bit registers of a thread.
    stack_bytes: memory of a thread for what found no register.
    matrix: kinds of matrix instruction, such as "wgmma bf16"; "emulated" where the kernel asks for
        a matrix product and the code has no matrix instruction; empty where it asks for none.
    """

    name: str
    shared_bytes: int
    tensor_columns: int
    registers: int
    stack_bytes: int
    matrix: tuple[str, ...]


def inspect(compiled: Any) -> MachineCode:
    """The facts of Triton's compiled kernel."""
    registers, stack_bytes = _resources(compiled.asm["cubin"])
    source = compiled.asm.get("ttgir", "")  # CUDA C++ has none
    return MachineCode(
        compiled.metadata.name,
        compiled.metadata.shared,
        getattr(compiled.metadata, "tmem_size", None) or 0,
        registers,
        stack_bytes,
        matrix_kinds(compiled.asm["ptx"], asks=_DOT.search(source) is not None),
    )


def matrix_kinds(ptx: str, asks: bool) -> tuple[str, ...]:
    """Kinds of matrix instruction in `ptx`; `asks` says whether its source multiplies matrices."""
    kinds = {_kind(family, rest) for family, rest in _MATRIX_INSTRUCTION.findall(ptx)}
    if asks and not kinds:
        return ("emulated",)
    return tuple(sorted(kinds))


def _kind(family: str, rest: str) -> str:
    name = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05"}.get(family, family)
    operands = dict.fromkeys(_OPERAND.findall(rest))
    what = "x".join(operands)
    kind = _KIND.search(rest)
    if not what and kind is not None:
        what = kind[1]
    if "block_scale" in rest:
        what += " block-scaled"
    return f"{name} {what}".strip()


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of one thread, as NVIDIA's own tool reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    found = _USAGE.search(done.stdout)
    if found is None:
        said = (done.stderr or done.stdout).strip()[:200]
        raise MetainferError(f"{tool} does not tell the use of registers: {said}")
    return int(found[1]), int(found[2])
