"""What a launch compiles: noted instead of run, from shapes alone.

Triton compiles a kernel once for each combination of argument types, of constants, of numbers and
addresses that 16 divides, and of options. `unit_of` finds that combination as Triton's own
just-in-time compiler does, without a GPU and without memory behind the tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from metainfer.core.errors import MetainferError, UserError
from metainfer.kernels.gpu import program
from metainfer.kernels.gpu.program import CudaKernel, CudaUnit
from metainfer.kernels.triton.launch import Grid

_POINTERS: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "u1",
}
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class CompileUnit:
    """One piece of machine code: equal units compile to equal code for one target.

    Attributes:
        kernel: the function under `triton.jit`.
        signature: type of each parameter in order, "constexpr" for constants.
        constants: value of each constant, by place among the parameters.
        divisible: places of the arguments that 16 divides.
        options: the compiler's options by name, such as num_warps.
    """

    kernel: Any
    signature: tuple[str, ...]
    constants: tuple[tuple[int, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def runtime_types(self) -> tuple[str, ...]:
        """Types of the arguments that are left when constants are compiled in."""
        return tuple(kind for kind in self.signature if kind != "constexpr")

    @property
    def runtime_places(self) -> tuple[int, ...]:
        """Places of these arguments among the parameters."""
        return tuple(n for n, kind in enumerate(self.signature) if kind != "constexpr")

    def named_constants(self) -> dict[str, Any]:
        names = self.kernel.arg_names
        return {names[place]: value for place, value in self.constants}

    def facts(self) -> dict[str, str]:
        """What tells it from other units of its kernel."""
        constants = dict(self.constants)
        said = {}
        for place, name in enumerate(self.kernel.arg_names):
            if place in constants:
                said[name] = f"is {_short(constants[place])}"
            else:
                rest = f", {_ALIGNMENT} divides it" if place in self.divisible else ""
                said[name] = f"is a {self.signature[place]}{rest}"
        return {**said, **{name: f"is {value}" for name, value in self.options}}

    def compile(self, capability: tuple[int, int]) -> Any:
        """Triton's compiled kernel for GPUs of `capability`; needs none."""
        source_type = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = source_type(
            fn=self.kernel,
            signature=dict(zip(self.kernel.arg_names, self.signature, strict=True)),
            constexprs={(place,): value for place, value in self.constants},
            attrs={(place,): [["tt.divisibility", _ALIGNMENT]] for place in self.divisible},
        )
        target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
        return triton.compile(source, target=target, options=dict(self.options))

    def __reduce__(self) -> tuple[Any, ...]:
        """Kernels travel to other processes by name."""
        where = (self.kernel.__module__, self.kernel.__qualname__)
        return _unit_by_name, (*where, self.signature, self.constants, self.divisible, self.options)


def _short(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def _unit_by_name(module: str, name: str, *fields: Any) -> CompileUnit:
    return CompileUnit(getattr(importlib.import_module(module), name), *fields)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch that did not happen."""

    unit: CompileUnit | CudaUnit
    grid: Grid


class RecordingLauncher:
    """Notes what would be launched; tensors may be on the device "meta".

    Args:
        portable: as a launcher that runs the code from its PTX.

    Attributes:
        launches: in order, those with an empty grid left out.
    """

    def __init__(
        self, capability: tuple[int, int], multiprocessors: int, *, portable: bool = False
    ) -> None:
        self.capability = capability
        self.multiprocessors = multiprocessors
        self.interpreted = False
        self.portable = portable
        self.launches: list[Launch] = []

    def __call__(
        self,
        kernel: Any,
        grid: Grid,
        *arguments: Any,
        num_warps: int = 4,
        num_stages: int = 1,
        **constants: Any,
    ) -> None:
        if 0 not in grid:
            constants.update(num_warps=num_warps, num_stages=num_stages)
            unit, _ = unit_of(kernel, arguments, constants)
            self.launches.append(Launch(unit, grid))

    def cuda(
        self,
        kernel: CudaKernel,
        grid: Grid,
        *arguments: Any,
        shared_bytes: int,
        **constants: int,
    ) -> None:
        if 0 not in grid:
            unit = program.unit_of(kernel, shared_bytes, constants)
            self.launches.append(Launch(unit, grid))

    def units(self) -> tuple[CompileUnit | CudaUnit, ...]:
        """What would be compiled, each once, in order of first use."""
        return tuple(dict.fromkeys(launch.unit for launch in self.launches))


def unit_of(
    kernel: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[CompileUnit, tuple[Any, ...]]:
    """(unit, the arguments that it takes at run time).

    Args:
        named: constants by name, and the compiler's options.
    """
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise UserError(
            f"{getattr(kernel, '__name__', kernel)} was defined for Triton's interpreter and has no"
            " code for a GPU",
            hint="start the process without TRITON_INTERPRET",
        )
    signature, constants, divisible, runtime = [], [], [], []
    for place, (parameter, value) in enumerate(_bound(kernel, arguments, named)):
        kind, is_divisible = ("constexpr", False)
        if not parameter.is_constexpr:
            kind, is_divisible = _specialised(parameter, value)
        signature.append(kind)
        if kind == "constexpr":
            constants.append((place, value))
        else:
            runtime.append(value)
        if is_divisible:
            divisible.append(place)
    names = set(kernel.arg_names)
    options = tuple(sorted((name, named[name]) for name in named if name not in names))
    unit = CompileUnit(kernel, tuple(signature), tuple(constants), tuple(divisible), options)
    return unit, tuple(runtime)


def _bound(
    kernel: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    """(parameter, value) in order of the parameters."""
    if len(arguments) > len(kernel.params):
        raise MetainferError(f"{kernel.__name__} takes {len(kernel.params)} arguments at most")
    values = dict(zip(kernel.arg_names, arguments, strict=False))
    bound = []
    for parameter in kernel.params:
        name = parameter.name
        if name in values and name in named:
            raise MetainferError(f"{kernel.__name__} is given {name} twice")
        if name in named:
            values[name] = named[name]
        elif name not in values:
            if not parameter.has_default:
                raise MetainferError(f"{kernel.__name__} is not given {name}")
            values[name] = parameter.default
        bound.append((parameter, values[name]))
    return bound


def _specialised(parameter: Any, value: Any) -> tuple[str, bool]:
    """(type, whether 16 divides it and the code may use that) of one argument."""
    specialise = not parameter.do_not_specialize
    aligned = specialise and not parameter.do_not_specialize_on_alignment
    if value is None:
        return "constexpr", False
    if hasattr(value, "data_ptr"):  # a tensor, or an address in the form of one
        star = "*k" if parameter.is_const else "*"
        return star + _POINTERS[value.dtype], aligned and _address(value) % _ALIGNMENT == 0
    declared = parameter.annotation_type
    if isinstance(value, (bool, float)):
        return declared or ("u1" if isinstance(value, bool) else "fp32"), False
    if not isinstance(value, int):
        raise MetainferError(f"{parameter.name} is a {type(value).__name__}: no kernel takes that")
    if declared.startswith(("fp", "bf")) or declared == "u1":
        return declared, False
    if not declared and specialise and value == 1:
        return "constexpr", False
    # A number that is declared with a type stays an argument even where it is 1.
    return declared or _integer_type(value), aligned and value % _ALIGNMENT == 0 and value != 1


def type_of_pointer(kind: str) -> torch.dtype:
    """Of what a pointer such as "*bf16" or "*kfp32" points to."""
    names = {name: dtype for dtype, name in _POINTERS.items()}
    name = kind.removeprefix("*")
    return names[name if name in names else name.removeprefix("k")]


def _integer_type(value: int) -> str:
    if -(2**31) <= value < 2**31:
        return "i32"
    return "i64" if value < 2**63 else "u64"


def _address(tensor: Any) -> int:
    """Of the first element; as if a tensor without memory began at 0."""
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        return tensor.storage_offset() * tensor.element_size()
    address: int = tensor.data_ptr()
    return address
