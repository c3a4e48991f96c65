"""Tensors of tests are small: one thread computes them as fast as two, and never waits for another
that a busy machine has stopped. Engines in tests take the threads of their settings."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
