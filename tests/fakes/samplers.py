"""Samplers on the CPU."""

from __future__ import annotations

import torch

from metainfer.kernels.cpu import BACKENDS as CPU_BACKENDS
from metainfer.kernels.reference import BACKENDS as REFERENCES
from metainfer.kernels.registry import Registry
from metainfer.llm.sample import Sampler
from metainfer.ops.base import Target


def cpu_sampler(vocab_size: int, num_slots: int = 1, kernel_order: str = "") -> Sampler:
    registry = Registry((*CPU_BACKENDS, *REFERENCES))
    device = torch.device("cpu")
    return Sampler(registry, Target("cpu"), vocab_size, device, num_slots, kernel_order)
