"""Runs kernels written in Gluon on the CPU, as Triton's interpreter does not.

A kernel's Python is run as it stands, once per program, with the language replaced: tensors are
torch tensors, layouts are ignored, shared memory is a tensor full of garbage. Loads and stores
outside of a tensor fail. Copies into shared memory happen as late as they may: when they are waited
for; so are asynchronous products. Inline assembly is read word by word. What this cannot show is a
missing barrier or fence, and a layout that the compiler refuses.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.experimental import gluon

from metainfer.kernels.triton.launch import Grid, JitLauncher
from tests.fakes.ptx_words import assembly, signed

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def _raw(value: Any) -> Any:
    return value.data if isinstance(value, Tensor) else value


class Tensor:
    """A value of a kernel; layouts are the compiler's business."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.data[at])

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        return Tensor(self.data.contiguous().view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.data.reshape(shape))


def _operator(name: str, function: Callable[..., Any]) -> None:
    def forward(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return other + self
        return Tensor(function(self.data, _raw(other)))

    def backward(self: Tensor, other: Any) -> Any:
        return Tensor(function(torch.as_tensor(_raw(other)), self.data))

    setattr(Tensor, f"__{name}__", forward)
    setattr(Tensor, f"__r{name}__", backward)


def _divided(one: Any, other: Any) -> Any:
    return torch.div(one, other, rounding_mode="trunc")


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div,
    "floordiv": _divided, "mod": torch.remainder, "and": torch.bitwise_and,
    "or": torch.bitwise_or, "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}.items():  # fmt: skip
    _operator(_name, _function)


class Pointer:
    """Addresses of elements of one tensor, counted in elements."""

    def __init__(self, memory: torch.Tensor, element: torch.dtype, at: torch.Tensor) -> None:
        self.memory, self.element, self.at = memory, element, at

    @staticmethod
    def to_start(tensor: torch.Tensor) -> Pointer:
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return Pointer(memory, tensor.dtype, torch.tensor(tensor.storage_offset()))

    dtype = property(lambda self: types.SimpleNamespace(element_ty=self.element))

    def moved(self, at: torch.Tensor) -> Pointer:
        return Pointer(self.memory, self.element, at)

    def __add__(self, by: Any) -> Pointer:
        return self.moved(self.at + _raw(by))

    __radd__ = __add__

    def __getitem__(self, at: Any) -> Pointer:
        return self.moved(self.at[at])

    def to(self, element: torch.dtype) -> Pointer:
        at = self.at * self.element.itemsize
        assert not (at % element.itemsize).any(), "an address is not aligned"
        return Pointer(self.memory, element, at // element.itemsize)

    def elements(self, where: torch.Tensor) -> torch.Tensor:
        """All of the tensor's; fails where one that is used lies outside."""
        size = self.element.itemsize
        elements = self.memory[: len(self.memory) // size * size].view(self.element)
        used = self.at[where]
        inside = not len(used) or (int(used.min()) >= 0 and int(used.max()) < len(elements))
        assert inside, "an address lies outside of its tensor"
        return elements


class Shared:
    """A view of shared memory."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view

    dtype = property(lambda self: self.view.dtype)

    def index(self, at: Any) -> Shared:
        return Shared(self.view[int(at)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.view.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.view.permute(*order))

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.view.clone())

    def store(self, value: Tensor) -> None:
        assert value.data.shape == self.view.shape and value.data.dtype == self.view.dtype
        self.view.copy_(value.data)


class Language:
    """Stands for `gl` and for what modules import from its corners, in one program."""

    def __init__(self, place: tuple[int, ...]) -> None:
        self._place = place
        self._copies: list[Callable[[], None]] = []
        self._groups: list[list[Callable[[], None]]] = []
        self.constexpr = None
        self.__dict__.update(_DTYPES)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *arguments, **named: None
        raise AttributeError(f"the machine knows no gl.{name}")

    static_range = staticmethod(range)

    def program_id(self, axis: int) -> Tensor:
        return Tensor(torch.tensor(self._place[axis], dtype=torch.int32))

    def pointer_type(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def arange(self, start: int, end: int, layout: Any = None) -> Tensor:
        return Tensor(torch.arange(start, end, dtype=torch.int32))

    def full(self, shape: list[int], value: Any, dtype: torch.dtype, layout: Any = None) -> Tensor:
        return Tensor(torch.full(shape, value, dtype=dtype))

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any = None) -> Tensor:
        return self.full(shape, 0, dtype)

    def where(self, condition: Any, one: Any, other: Any) -> Any:
        chosen = torch.as_tensor(_raw(condition))
        if isinstance(one, Pointer):
            # Of two memories a program takes one, all elements alike.
            assert one.memory is other.memory or chosen.numel() == 1
            if one.memory is not other.memory:
                return one if chosen else other
            return one.moved(torch.where(chosen, one.at, other.at))
        return Tensor(torch.where(chosen, _raw(one), _raw(other)))

    def maximum(self, one: Any, other: Any) -> Tensor:
        return Tensor(torch.maximum(torch.as_tensor(_raw(one)), torch.as_tensor(_raw(other))))

    def minimum(self, one: Any, other: Any) -> Tensor:
        return Tensor(torch.minimum(torch.as_tensor(_raw(one)), torch.as_tensor(_raw(other))))

    def max(self, x: Tensor, axis: int) -> Tensor:
        return Tensor(x.data.amax(axis))

    def sum(self, x: Tensor, axis: int) -> Tensor:
        return Tensor(x.data.sum(axis))

    def exp2(self, x: Tensor) -> Tensor:
        return Tensor(x.data.exp2())

    def log2(self, x: Tensor) -> Tensor:
        return Tensor(x.data.log2())

    def join(self, one: Tensor, other: Tensor) -> Tensor:
        return Tensor(torch.stack([one.data, other.data], dim=-1))

    def convert_layout(self, x: Tensor, layout: Any) -> Tensor:
        return x

    def multiple_of(self, x: Pointer, number: int) -> Pointer:
        bytes_at = x.at * x.element.itemsize
        assert x.memory.data_ptr() % number == 0 and not (bytes_at % number).any(), (
            f"an address is no multiple of {number}"
        )
        return x

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
        where = torch.as_tensor(True if mask is None else _raw(mask))
        at, where = torch.broadcast_tensors(pointer.at, where)
        elements = pointer.moved(at).elements(where)
        result = torch.full(at.shape, other, dtype=pointer.element)
        result[where] = elements[at[where]]
        return Tensor(result)

    def store(self, pointer: Pointer, value: Tensor, mask: Any = None) -> None:
        where = torch.as_tensor(True if mask is None else _raw(mask))
        at, where, numbers = torch.broadcast_tensors(pointer.at, where, value.data)
        elements = pointer.moved(at).elements(where)
        assert numbers.dtype == pointer.element
        elements[at[where]] = numbers[where]

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        garbage = torch.full((dtype.itemsize * torch.Size(shape).numel(),), 255, dtype=torch.uint8)
        return Shared(garbage.view(dtype).view(shape))

    def as_words(self, memory: Shared, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(memory.view.view(dtype).view(shape))

    def copy_async(self, to: Shared, pointer: Pointer, mask: Any = None) -> None:
        self._copies.append(lambda: to.store(self.load(pointer, mask)))

    def commit_group(self) -> None:
        self._groups.append(self._copies)
        self._copies = []

    def wait_group(self, left: int) -> None:
        while len(self._groups) > left:
            for copy in self._groups.pop(0):
                copy()

    def barrier(self) -> None:
        pass

    def mma_v2(self, one: Tensor, other: Tensor, acc: Tensor) -> Tensor:
        return Tensor(acc.data + one.data.float() @ other.data.float())

    def warpgroup_mma(
        self, one: Shared, other: Shared, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> Callable[[], Tensor]:
        """Multiplied when it is waited for: until then its operands must not change."""
        assert is_async

        def product() -> Tensor:
            added = acc() if callable(acc) else acc
            result = one.view.float() @ other.view.float()
            return Tensor(result + added.data if use_acc else result)

        return product

    def warpgroup_mma_wait(self, left: int, deps: list[Callable[[], Tensor]]) -> Tensor:
        assert left == 0
        (product,) = deps
        return product()

    def fence_async_shared(self) -> None:
        pass

    def inline_asm_elementwise(
        self,
        asm: str,
        constraints: str,
        arguments: list[Tensor],
        dtypes: Any,
        pure: bool,
        pack: int,
    ) -> Any:
        outputs = constraints.count("=")
        words = torch.broadcast_tensors(*(argument.data for argument in arguments))
        results = assembly(asm, outputs, [word.to(torch.int64) & 0xFFFFFFFF for word in words])
        return tuple(Tensor(signed(result)) for result in results)


_REPLACED = frozenset(
    {
        "copy_async", "barrier", "mma_v2", "as_words", "warpgroup_mma", "warpgroup_mma_wait",
        "fence_async_shared",
    }
)  # fmt: skip
"""What modules import by name."""


def _replaced(function: Any, language: Language, known: dict[Any, Any]) -> Any:
    """A kernel's Python with the language replaced, in all that it calls."""
    if function in known:
        return known[function]
    names = dict(function.__globals__)
    result = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    known[function] = result
    for name in function.__code__.co_names:
        value = names.get(name)
        if name in ("gl", "async_copy"):
            names[name] = language
        elif name in _REPLACED:
            names[name] = getattr(language, name)
        elif isinstance(value, triton.language.constexpr):
            names[name] = value.value
        elif hasattr(value, "fn"):
            names[name] = _replaced(value.fn, language, known)
    return result


class GluonLauncher:
    """Runs kernels in Gluon as above, and others in Triton's interpreter."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int) -> None:
        self.capability, self.multiprocessors = capability, multiprocessors
        self.interpreted = self.portable = False
        self._others = JitLauncher(capability, multiprocessors)
        self.ran: list[str] = []

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
        function = kernel.fn
        self.ran.append(function.__name__)
        if function.__globals__.get("gluon") is not gluon:
            self._others(kernel, grid, *arguments, num_warps=num_warps, **constants)
            return
        constants.pop("maxnreg", None)
        for place in itertools.product(*(range(size) for size in grid)):
            values = [
                Pointer.to_start(value)
                if isinstance(value, torch.Tensor)
                else torch.tensor(value, dtype=torch.int64)
                if isinstance(value, int)
                else value
                for value in arguments
            ]
            wrapped = [Tensor(v) if isinstance(v, torch.Tensor) else v for v in values]
            _replaced(function, Language(place), {})(*wrapped, **constants)
