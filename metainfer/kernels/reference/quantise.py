"""Activations as fp8 groups, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.formats import encode_groups
from metainfer.kernels.reference.rotation import rotated
from metainfer.kernels.registry import Backend
from metainfer.ops.formats import FP8_FLOOR
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.quantise import QuantiseFp8Case


def fp8_groups(x_TI: torch.Tensor, group: int, scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [T, I] and scales [T, I / group], uint8 (e8m0) or fp32."""
    codes_TI, scales_TB = encode_groups(x_TI, "e4m3", group, scale, FP8_FLOOR)
    return codes_TI, scales_TB.view(torch.float32) if scale == "fp32" else scales_TB


def fp8(
    case: QuantiseFp8Case, x_THD: torch.Tensor, rotation_TR2: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if rotation_TR2 is not None:
        x_THD = rotated(x_THD, rotation_TR2, inverse=True).to(x_THD.dtype)
    return fp8_groups(x_THD.flatten(1), case.group, case.scale)


BACKENDS = (Backend("quantise.fp8", REFERENCE, fp8),)
