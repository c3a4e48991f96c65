"""The rotary embedding, plainly."""

from __future__ import annotations

import torch

from metainfer.kernels.reference.norm import layer_normed, rms
from metainfer.kernels.reference.rotation import rotated
from metainfer.kernels.registry import Backend
from metainfer.ops.kernel_order import REFERENCE
from metainfer.ops.rope import LayerNormRotateCase, NormRotateCase, RotateCase


def rotate(case: RotateCase, x_THD: torch.Tensor, rotation_TR2: torch.Tensor) -> torch.Tensor:
    turned = rotated(x_THD, rotation_TR2, case.inverse, case.interleaved, case.leading)
    return x_THD.copy_(turned)


def norm_rotate(
    case: NormRotateCase,
    x_THD: torch.Tensor,
    weight_D: torch.Tensor | None,
    rotation_TR2: torch.Tensor,
) -> torch.Tensor:
    normed = rms(x_THD, case.eps)
    if weight_D is not None:
        normed = normed * weight_D
    # The norm rounds as `norm.rms_norm` does; the rotation rounds once more.
    return rotated(normed.to(x_THD.dtype), rotation_TR2, inverse=False).to(x_THD.dtype)


def layer_norm_rotate(
    case: LayerNormRotateCase,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    rotation_TR2: torch.Tensor,
) -> torch.Tensor:
    normed_T1D = layer_normed(x_TD, weight_D, bias_D, case.eps).to(x_TD.dtype).unsqueeze(1)
    y_T1D = rotated(normed_T1D, rotation_TR2, False, case.interleaved, case.leading)
    return y_T1D.squeeze(1).to(x_TD.dtype)


BACKENDS = (
    Backend("rope.rotate", REFERENCE, rotate),
    Backend("rope.norm_rotate", REFERENCE, norm_rotate),
    Backend("norm.layer_norm_rotate", REFERENCE, layer_norm_rotate),
)
