"""Sinkhorn normalisation of small square matrices with an exact, memory-free backward.

Forward: softmax over the last index, plus eps, then alternating column and row division (column
first). Backward: at the fixed point P = diag(a) exp(C) diag(b) is doubly stochastic, so
dC = P * (G - u 1' - 1 v') with u = (P*G)1 - P v and v = (P*G)'1 - P'u, solved by the same number
of alternating rounds. With 20 rounds both agree with automatic differentiation to fp32 rounding.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only machines use the plain version
    triton = None


def plain(c: Tensor, rounds: int, eps: float) -> Tensor:
    """c [..., n * n] -> doubly stochastic matrices, flattened."""
    n = round(c.shape[-1] ** 0.5)
    p = c.unflatten(-1, (n, n)).softmax(-1) + eps
    p = p / (p.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        p = p / (p.sum(-1, keepdim=True) + eps)
        p = p / (p.sum(-2, keepdim=True) + eps)
    return p.flatten(-2)


def plain_backward(p: Tensor, g: Tensor, rounds: int) -> Tensor:
    n = round(p.shape[-1] ** 0.5)
    p, g = p.unflatten(-1, (n, n)), g.unflatten(-1, (n, n))
    a, b = (p * g).sum(-1), (p * g).sum(-2)
    v = torch.zeros_like(b)
    for _ in range(rounds):
        u = a - (p * v[..., None, :]).sum(-1)
        v = b - (p * u[..., :, None]).sum(-2)
    return (p * (g - u[..., :, None] - v[..., None, :])).flatten(-2)


if triton is not None:

    @triton.jit
    def forward_kernel(c, out, rows, eps, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at = row[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        inside = (at >= 0) & (row < rows)[:, None, None]
        x = tl.load(c + at, mask=inside, other=0.0)
        x = tl.exp(x - tl.max(x, 2)[:, :, None])
        p = x / tl.sum(x, 2)[:, :, None] + eps
        p = p / (tl.sum(p, 1)[:, None, :] + eps)
        for _ in range(ROUNDS - 1):
            p = p / (tl.sum(p, 2)[:, :, None] + eps)
            p = p / (tl.sum(p, 1)[:, None, :] + eps)
        tl.store(out + at, p, mask=inside)

    @triton.jit
    def backward_kernel(p, g, out, rows, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at = row[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        inside = (at >= 0) & (row < rows)[:, None, None]
        x = tl.load(p + at, mask=inside, other=0.25)
        y = tl.load(g + at, mask=inside, other=0.0)
        a = tl.sum(x * y, 2)
        b = tl.sum(x * y, 1)
        v = b * 0.0
        u = a
        for _ in range(ROUNDS):
            u = a - tl.sum(x * v[:, None, :], 2)
            v = b - tl.sum(x * u[:, :, None], 1)
        tl.store(out + at, x * (y - u[:, :, None] - v[:, None, :]), mask=inside)


@torch.library.custom_op("pebble::sinkhorn", mutates_args=())
def sinkhorn(c: Tensor, rounds: int, eps: float) -> Tensor:
    """c fp32 [..., 16] -> fp32 [..., 16]."""
    if not c.is_cuda:
        return plain(c, rounds, eps)
    c = c.contiguous()
    out, rows = torch.empty_like(c), c.numel() // 16
    forward_kernel[(triton.cdiv(rows, 128),)](c, out, rows, eps, ROUNDS=rounds, BLOCK=128)
    return out


@torch.library.custom_op("pebble::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(p: Tensor, g: Tensor, rounds: int) -> Tensor:
    if not p.is_cuda:
        return plain_backward(p, g, rounds)
    g = g.contiguous()
    out, rows = torch.empty_like(p), p.numel() // 16
    backward_kernel[(triton.cdiv(rows, 128),)](p, g, out, rows, ROUNDS=rounds, BLOCK=128)
    return out


@sinkhorn.register_fake
def _(c, rounds, eps):
    return torch.empty(c.shape, dtype=c.dtype, device=c.device)


@sinkhorn_backward.register_fake
def _(p, g, rounds):
    return torch.empty(p.shape, dtype=p.dtype, device=p.device)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.rounds = inputs[1]


def _backward(ctx, grad):
    return sinkhorn_backward(ctx.saved_tensors[0], grad, ctx.rounds), None, None


sinkhorn.register_autograd(_backward, setup_context=_setup)
