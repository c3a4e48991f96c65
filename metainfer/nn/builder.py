"""LayerBuilder: what layers need while they are built: weights to read and kernels to bind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from metainfer.arch.record import Arch
from metainfer.core.dtypes import DType
from metainfer.core.errors import UserError
from metainfer.kernels.registry import Kernel, Registry
from metainfer.nn.placement import Placement
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import FP32_CACHES, CacheFormats
from metainfer.weights.formats import DenseWeight, Fp8BlockWeight, Weight
from metainfer.weights.load import Checkpoint

_DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "float32", torch.bfloat16: "bfloat16"}
)


def dtype_name(dtype: torch.dtype) -> str:
    """What the cases of ops call `dtype`. Raises UserError for one that no op computes in."""
    if dtype not in _DTYPE_NAMES:
        raise UserError(
            f"{dtype} is no format that the model computes in",
            hint="choose " + " or ".join(_DTYPE_NAMES.values()),
        )
    return _DTYPE_NAMES[dtype]


class Rounding(NamedTuple):
    """How rows are rounded to e4m3 codes before products with quantised matrices.

    Attributes:
        group: channels that share a scale.
        scale: format of scales, "e8m0" or "fp32".
    """

    group: int
    scale: str


class SideStream(NamedTuple):
    """Where work may run beside the current stream.

    Attributes:
        most_rows: of steps in which it does; None for all.
    """

    stream: torch.cuda.Stream
    most_rows: int | None = None

    def takes(self, rows: int) -> bool:
        return self.most_rows is None or rows <= self.most_rows


class LayerBuilder:
    """Passed to the constructors of layers, which keep nothing of it but bound kernels.

    Attributes:
        placement: how the ranks of the group share the model.
        dtype, stream_dtype: names of the formats of activations and of residual streams.
        compute_dtype: `dtype` as torch knows it.
        rounding: of rows before products with quantised matrices; None where rows stay as they are.
        caches: formats of the caches that layers write and read.
        side_stream: None where all work runs on the current stream.
        weights_nbytes: bytes of all weights that were built so far, in the form they are kept in.
        kernels: all that were bound so far.
    """

    def __init__(
        self,
        arch: Arch,
        checkpoint: Checkpoint,
        *,
        registry: Registry,
        target: Target,
        kernel_order: str,
        placement: Placement,
        device: torch.device,
        compute_dtype: torch.dtype,
        stream_dtype: torch.dtype,
        activations: str = "plain",
        caches: CacheFormats = FP32_CACHES,
        side_stream: SideStream | None = None,
    ) -> None:
        """`activations`: one of `ops.uses_v4.ACTIVATIONS`."""
        self.arch = arch
        self.checkpoint = checkpoint
        self.placement = placement
        self.device = device
        self.compute_dtype = compute_dtype
        self.dtype = dtype_name(compute_dtype)
        self.stream_dtype = dtype_name(stream_dtype)
        self.rounding = _rounding(arch) if activations == "fp8" else None
        self.caches = caches
        self.side_stream = side_stream
        self.weights_nbytes = 0
        self.kernels: list[Kernel] = []
        self._again = False
        self._registry = registry
        self._target = target
        registry.check_order(kernel_order)
        self._order = kernel_order

    def kernel(self, op: str, case: Any) -> Callable[..., Any]:
        """An op without weights, bound to `case`."""
        return self._bind(op, case).run

    def weighted(self, op: str, case: Any, *weights: Any) -> Callable[..., Any]:
        """An op bound to `case` and to `weights` (tensors, or tuples of them), prepared once."""
        kernel = self._bind(op, case)
        prepared = kernel.prepare(*(self._placed(weight) for weight in weights))
        fresh = [t for t in _tensors(prepared) if not (self._again and _lies_in(t, weights))]
        self.weights_nbytes += sum(tensor.nbytes for tensor in fresh)
        return partial(kernel.run, prepared)

    @contextmanager
    def again(self) -> Iterator[None]:
        """While weights are bound that lie in the memory of others: what a backend uses as it lies
        there is not counted a second time."""
        self._again = True
        yield
        self._again = False

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of the checkpoint that is used as it is, on the device."""
        tensor = self._placed(self.checkpoint.tensor(name, dtype))
        self.weights_nbytes += tensor.nbytes
        return tensor

    def norm_weight(self, prefix: str) -> torch.Tensor:
        """The fp32 weight [D] of the norm `prefix`."""
        return self.tensor(f"{prefix}.weight", torch.float32)

    def _bind(self, op: str, case: Any) -> Kernel:
        kernel = self._registry.bind(op, case, self._target, self._order)
        self.kernels.append(kernel)
        return kernel

    def _placed(self, weight: Any) -> Any:
        if isinstance(weight, tuple):
            return tuple(self._placed(part) for part in weight)
        return weight.to(self.device).contiguous()  # parts of columns lie apart


def _rounding(arch: Arch) -> Rounding:
    """As the released models round: in groups as wide as a block of weights, with their scales."""
    stored = arch.quantisation
    scale = "e8m0" if stored.fp8_scale_dtype is DType.F8_E8M0 else "fp32"
    return Rounding(stored.fp8_block[1], scale)


def weight_tensors(weight: Weight) -> tuple[str, tuple[torch.Tensor, ...], tuple[int, int]]:
    """How ops see a weight: the name of its format, its tensors, and (rows, columns) that share a
    scale."""
    if isinstance(weight, DenseWeight):
        return "dense", (weight.tensor,), (1, 1)
    if isinstance(weight, Fp8BlockWeight):
        return "fp8_block", (weight.codes_OI, weight.scale), weight.block
    columns = weight.shape[-1] // weight.scale_OG.shape[-1]
    return "fp4_group", (weight.packed_OI2, weight.scale_OG), (1, columns)


def _lies_in(tensor: torch.Tensor, weights: tuple[Any, ...]) -> bool:
    """Whether it is, or begins in, the memory of one of `weights`."""
    place = tensor.data_ptr()
    return any(
        given.data_ptr() <= place < given.data_ptr() + max(1, given.nbytes)
        for given in _tensors(weights)
    )


def _tensors(prepared: Any) -> Iterator[torch.Tensor]:
    """All tensors in what a backend prepared."""
    if isinstance(prepared, torch.Tensor):
        yield prepared
    elif isinstance(prepared, (tuple, list)):
        for part in prepared:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(prepared):
        for field in dataclasses.fields(prepared):
            yield from _tensors(getattr(prepared, field.name))
