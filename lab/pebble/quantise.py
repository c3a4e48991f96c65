"""The released number formats, simulated with straight-through gradients, and their encoders' maths.

fp8: e4m3 codes with one power-of-two scale per 128x128 block. fp4: e2m1 codes with one power-of-two
scale per 32 values of a row. Activations: e4m3 per 128 values; stored latents: e4m3 per 64 values of
all but the last 64 (rotary) channels. Scales: 2^ceil(log2(largest / format maximum)).
"""

import torch
from torch import Tensor

FP8_PARTS = ("attn.wq_a.", "attn.wq_b.", "attn.wkv.", "attn.wo_a.", "attn.wo_b.", "indexer.wq_b.", "shared_experts.")


def kind(name: str) -> str:
    """'fp4', 'fp8' or 'plain' for a tensor name."""
    if "ffn.experts." in name:
        return "fp4"
    return "fp8" if any(part in name for part in FP8_PARTS) else "plain"


def power_scale(largest: Tensor, top: float, floor: float) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(largest.clamp(min=floor) / top)))


def fp8_value(x: Tensor) -> Tensor:
    """Rounds fp32 to the e4m3 grid (|x| <= 448)."""
    return x.to(torch.float8_e4m3fn).to(torch.float32)


def fp4_value(x: Tensor) -> Tensor:
    """Rounds |x| <= 6 to the e2m1 grid: steps 0.5 below 2, 1 below 4, else 2."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def fp8_weight(w: Tensor) -> Tensor:
    """[out, in] -> the value that the fp8 block format keeps."""
    rows, cols = w.shape
    block = w.float().view(rows // 128, 128, cols // 128, 128)
    scale = power_scale(block.abs().amax((1, 3), keepdim=True), 448.0, 1e-20)
    return (fp8_value(block / scale) * scale).view(rows, cols)


def fp4_weight(w: Tensor) -> Tensor:
    """[..., in] -> the value that the fp4 format keeps."""
    block = w.float().unflatten(-1, (-1, 32))
    scale = power_scale(block.abs().amax(-1, keepdim=True), 6.0, 1e-20)
    return (fp4_value(block / scale) * scale).flatten(-2)


def released_value(name: str, w: Tensor) -> Tensor:
    """What a released checkpoint would hold for this tensor, as fp32."""
    which = kind(name)
    return fp8_weight(w) if which == "fp8" else fp4_weight(w) if which == "fp4" else w.float()


def straight(x: Tensor, y: Tensor) -> Tensor:
    """y with the gradient of x."""
    return x + (y - x).detach()


def fake_activation(x: Tensor) -> Tensor:
    """e4m3 per 128 channels with a power-of-two scale."""
    block = x.float().unflatten(-1, (-1, 128))
    scale = power_scale(block.abs().amax(-1, keepdim=True), 448.0, 1e-4)
    return straight(x, (fp8_value(block / scale) * scale).flatten(-2).to(x.dtype))


def fake_latent(x: Tensor) -> Tensor:
    """e4m3 per 64 channels for all but the last 64, as the cache stores latents."""
    block = x[..., :-64].float().unflatten(-1, (-1, 64))
    scale = power_scale(block.abs().amax(-1, keepdim=True), 448.0, 1e-4)
    body = (fp8_value(block / scale) * scale).flatten(-2).to(x.dtype)
    return straight(x, torch.cat((body, x[..., -64:]), -1))


def cast_weights(master: dict[str, Tensor], simulate: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights for one step: matrices in `dtype` (quantised with straight-through gradients or not)."""
    out = {}
    for name, w in master.items():
        if simulate and kind(name) != "plain":
            out[name] = straight(w, released_value(name, w)).to(dtype)
        else:
            keep = w.dim() == 1 or name.endswith((".ape", "_fn"))
            out[name] = w if keep else w.to(dtype)
    return out
