"""Shapes of library products on the device "meta", for versions of torch that do not know them."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.functional import ScalingType, scaled_mm
from torch.utils._python_dispatch import TorchDispatchMode


def library_shapes() -> AbstractContextManager[Any]:
    """In it, all products of this package can be made without numbers. Nothing where
    torch does so by itself."""
    return contextlib.nullcontext() if _torch_knows() else LibraryShapes()


class LibraryShapes(TorchDispatchMode):
    """Answers for the products alone: a row for each of the left side, bf16 where it is coded."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function.name() == "aten::mm.dtype":
            left, right, dtype = arguments
            return left.new_empty(len(left), right.shape[1], dtype=dtype)
        if function.name() == "aten::_scaled_mm_v2":
            left, right = arguments[:2]
            return left.new_empty(len(left), right.shape[1], dtype=torch.bfloat16)
        return function(*arguments, **(named or {}))


def _torch_knows() -> bool:
    """Whether torch tells the shapes of both products."""
    with torch.device("meta"):
        plain = torch.empty(128, 128, dtype=torch.bfloat16)
        codes, scales = plain.to(torch.float8_e4m3fn), torch.empty(1, 128)
        blocks = torch.empty(1, 4).T  # padded
    try:
        torch.mm(plain, plain.T, out_dtype=torch.float32)
        scaled_mm(
            codes,
            codes.T,
            scales.T,
            ScalingType.BlockWise1x128,
            blocks,
            ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )
    except (NotImplementedError, RuntimeError):
        return False
    return True
