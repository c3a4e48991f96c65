"""Muon for the matrices, Adam for everything else, both over a dictionary of fp32 weights."""

import torch
from torch import Tensor

# Adam's learning rate and weight decay by the end (or part) of the name, first match wins.
ADAM = (
    ("embed.weight", 2e-2, 0.0),
    ("head.weight", 4e-3, 0.01),
    ("indexer", 2e-3, 0.0),
    ("gate.weight", 2e-3, 0.0),
    ("_fn", 2e-3, 0.0),
    ("", 4e-3, 0.0),
)


def is_matrix(name: str) -> bool:
    """True for the tensors that Muon updates."""
    if "indexer" in name or name.endswith("gate.weight"):
        return False
    return name.startswith("layers.") and (
        "ffn.experts." in name
        or name.endswith(("wq_a.weight", "wq_b.weight", "wkv.weight"))
        or name.endswith(("wgate.weight", "wo_a.weight", "wo_b.weight"))
        or "shared_experts" in name
    )


def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix; g [n, rows, cols]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """`step(gradients, factor)` updates the weights in place; `state` is what a resume needs."""

    def __init__(self, weights: dict[str, Tensor], groups: int, rate: float = 0.02, decay: float = 0.05):
        self.weights, self.rate, self.decay = weights, rate, decay
        self.state = {"step": 0, "momentum": {}, "adam": {}}
        self.stacks: dict[tuple[int, int], list[tuple[str, tuple[int, ...]]]] = {}
        for name, w in weights.items():
            if is_matrix(name):
                self.state["momentum"][name] = torch.zeros_like(w)
                parts = groups if "wo_a" in name else 1
                view = (-1, w.shape[-2] // parts, w.shape[-1])
                self.stacks.setdefault(view[1:], []).append((name, view))
            else:
                self.state["adam"][name] = (torch.zeros_like(w), torch.zeros_like(w))
        self.small = list(self.state["adam"])

    @torch.no_grad()
    def step(self, grad: dict[str, Tensor], factor: float) -> None:
        self.state["step"] += 1
        momentum = [self.state["momentum"][n] for n in self.state["momentum"]]
        torch._foreach_lerp_(momentum, [grad[n] for n in self.state["momentum"]], 0.05)
        for (rows, cols), members in self.stacks.items():
            look = [grad[n].lerp(self.state["momentum"][n], 0.95).view(v) for n, v in members]
            update = orthogonal(torch.cat(look)) * max(1.0, rows / cols) ** 0.5
            parts = update.split([piece.shape[0] for piece in look])
            targets = [self.weights[n].view(v) for n, v in members]
            torch._foreach_mul_(targets, 1 - self.rate * factor * self.decay)
            torch._foreach_add_(targets, list(parts), alpha=-self.rate * factor)
        self.adam(grad, factor)

    def adam(self, grad: dict[str, Tensor], factor: float) -> None:
        step = self.state["step"]
        all_grads = [grad[n] for n in self.small]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(all_grads)))
        scale = (1.0 / norm.clamp(min=1e-6)).clamp(max=1.0)
        for part, rate, decay in ADAM:
            names = [n for n in self.small if part in n and self.owner(n) == part]
            if not names:
                continue
            g = torch._foreach_mul([grad[n] for n in names], scale)
            first = [self.state["adam"][n][0] for n in names]
            second = [self.state["adam"][n][1] for n in names]
            torch._foreach_lerp_(first, g, 0.1)
            torch._foreach_mul_(second, 0.97)
            torch._foreach_addcmul_(second, g, g, 0.03)
            root = torch._foreach_sqrt(second)
            torch._foreach_div_(root, (1 - 0.97**step) ** 0.5)
            torch._foreach_add_(root, 1e-10)
            targets = [self.weights[n] for n in names]
            torch._foreach_mul_(targets, 1 - rate * factor * decay)
            size = rate * factor / (1 - 0.9**step)
            torch._foreach_addcdiv_(targets, first, root, value=-size)

    @staticmethod
    def owner(name: str) -> str:
        return next(part for part, *_ in ADAM if part in name)
