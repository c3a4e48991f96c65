"""Triton's kernels are interpreted here: what compiles them runs in processes of its own.

Tensors of tests are small: one thread computes them as fast as two, and never waits for another
that a busy machine has stopped. Engines in tests take the threads of their settings."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
