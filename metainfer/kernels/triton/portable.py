"""Runs code that was compiled for an older GPU on a newer one, from its PTX.

The driver translates PTX of sm_80 or sm_89 for any newer GPU. The code keeps what the older one
can do: no instruction and no more shared memory than it has. That is how the kernels of a card
that is not at hand are checked and timed. (Results hold for that card too; times are those of its
code on the GPU that runs it.)
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from metainfer.core.errors import MetainferError
from metainfer.kernels.gpu.compilations import Compilations
from metainfer.kernels.gpu.driver import PARAMETER_BYTES, Driver
from metainfer.kernels.gpu.program import CudaKernel
from metainfer.kernels.gpu.run import Programs
from metainfer.kernels.triton.launch import Grid, shared_limit
from metainfer.kernels.triton.record import CompileUnit, unit_of
from metainfer.kernels.triton.started import Key, key_of, takes_values
from metainfer.ops.targets import check_portable

_THREADS_PER_WARP = 32
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)[^,)]*")
_POINTER = "Q"
_NUMBERS = {
    "i8": "b",
    "u8": "B",
    "u1": "B",
    "i16": "h",
    "u16": "H",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "fp32": "f",
    "fp64": "d",
}
"""Types of numbers as the module struct names them."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A function in a GPU's memory.

    Attributes:
        form: of its arguments, of which each has `PARAMETER_BYTES`, as the module struct writes
            it; those that Triton adds at the end are null pointers.
    """

    function: int
    form: struct.Struct
    threads: int
    shared_bytes: int


class Started(NamedTuple):
    """What a launch of known arguments (`started.key_of`) runs.

    Attributes:
        kernel: kept, so that no other gets its id, which is in the key.
        places: of the arguments that the function takes.
    """

    kernel: Any
    loaded: Loaded
    places: tuple[int, ...]


class PtxLauncher:
    """Starts kernels as code for `capability` on the current CUDA device.

    The first launch of a unit compiles and loads it, which a CUDA graph cannot capture; later ones
    can be captured.
    """

    def __init__(
        self,
        capability: tuple[int, int] = (8, 9),
        multiprocessors: int | None = None,
        driver: Driver | None = None,
        compilations: Compilations | None = None,
    ) -> None:
        """
        Args:
            multiprocessors: those of the current device where none are given.
            driver: NVIDIA's on this machine where none is given.
            compilations: told of every kernel that is started for the first time.
        """
        check_portable(capability)
        self.capability = capability
        self.interpreted = False
        self.portable = True
        self._driver = driver or Driver()
        if multiprocessors is None:
            multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        self.multiprocessors = multiprocessors
        self._loaded: dict[tuple[int, CompileUnit], Loaded] = {}
        self._started: dict[tuple[int, Key], Started] = {}
        self._compilations = compilations or Compilations()
        self._programs = Programs(capability, self._compilations, self._driver, portable=True)

    def __call__(
        self,
        kernel: Any,
        grid: Grid,
        *arguments: Any,
        num_warps: int = 4,
        num_stages: int = 1,
        **constants: Any,
    ) -> None:
        if 0 in grid:
            return
        constants["num_warps"], constants["num_stages"] = num_warps, num_stages
        stream = torch.cuda.current_stream()
        device = stream.device.index
        self._driver.enter(device)
        key = key_of(kernel, arguments, constants)
        made = None if key is None else self._started.get((device, key))
        if made is None:
            unit, runtime = unit_of(kernel, arguments, constants)
            loaded = self._load(device, unit)
            if key is not None and takes_values(kernel, arguments, constants):
                self._started[device, key] = Started(kernel, loaded, unit.runtime_places)
        else:
            loaded = made.loaded
            runtime = tuple([arguments[place] for place in made.places])
        self._driver.launch(
            loaded.function,
            (*grid, 1, 1)[:3],
            loaded.threads,
            loaded.shared_bytes,
            stream.cuda_stream,
            packed(loaded.form, runtime),
        )

    def _load(self, device: int, unit: CompileUnit) -> Loaded:
        """`unit` on the current device, from the first start on."""
        loaded = self._loaded.get((device, unit))
        if loaded is None:
            loaded = self._loaded[device, unit] = load(self._driver, unit, self.capability)
            self._compilations.note(unit.name, unit.facts())
        return loaded

    def cuda(
        self,
        kernel: CudaKernel,
        grid: Grid,
        *arguments: Any,
        shared_bytes: int,
        **constants: int,
    ) -> None:
        if 0 not in grid:
            self._programs.start(kernel, shared_bytes, constants, grid, arguments)


def load(driver: Driver, unit: CompileUnit, capability: tuple[int, int]) -> Loaded:
    """Compile `unit` for `capability` and bring it into the current device's memory.

    Raises:
        MetainferError: it needs more shared memory than that GPU has, or something of its launcher
            that is not done here.
    """
    compiled = unit.compile(capability)
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    limit = shared_limit(capability)
    if metadata.shared > limit:
        raise MetainferError(
            f"{unit.name} needs {metadata.shared} bytes of shared memory and"
            f" sm_{capability[0]}{capability[1]} has {limit}"
        )
    for name, plain in _PLAIN_METADATA.items():
        value = getattr(metadata, name, plain)
        if value != plain and value:
            raise MetainferError(f"{unit.name} wants {name} = {value}, which PTX alone cannot give")
    form = parameters(unit, ptx, metadata.name)
    function = driver.load(ptx, metadata.name)
    driver.allow_shared(function, metadata.shared)
    return Loaded(function, form, metadata.num_warps * _THREADS_PER_WARP, metadata.shared)


# What Triton's own launcher would see to, with the value at which there is nothing to do.
_PLAIN_METADATA = {
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "tensordesc_meta": None,
}


def parameters(unit: CompileUnit, ptx: str, name: str) -> struct.Struct:
    """How the arguments are written, as many as the function's PTX lists: after the unit's own come
    pointers to scratch memory, as many as the version of Triton has."""
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise MetainferError(f"the PTX of {unit.name} has no entry {name}")
    bits = [int(width) for _, width in _PARAMETER.findall(entry[1])]
    kinds = [
        _POINTER if kind.startswith("*") else _number_type(unit, kind)
        for kind in unit.runtime_types
    ]
    scratch = len(bits) - len(kinds)
    sizes = [struct.calcsize(kind) for kind in (*kinds, *[_POINTER] * scratch)]
    if [8 * size for size in sizes] != bits:
        raise MetainferError(
            f"{unit.name} takes {unit.runtime_types} and its PTX has parameters of {bits} bits"
        )
    written = (f"{kind}{PARAMETER_BYTES - struct.calcsize(kind)}x" for kind in kinds)
    return struct.Struct("<" + "".join(written) + f"{PARAMETER_BYTES}x" * scratch)


def _number_type(unit: CompileUnit, kind: str) -> str:
    if kind not in _NUMBERS:
        raise MetainferError(f"{unit.name} takes a number of type {kind}, which is not packed here")
    return _NUMBERS[kind]


def packed(form: struct.Struct, runtime: Sequence[Any]) -> bytes:
    """As `Driver.launch` takes them."""
    return form.pack(
        *[value.data_ptr() if isinstance(value, torch.Tensor) else value for value in runtime]
    )
