"""Triton's kernels are interpreted here: what compiles them runs in processes of its own.

Tensors of tests are small: one thread computes them as fast as two, and never waits for another
that a busy machine has stopped. Engines in tests take the threads of their settings."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

import pytest
import torch
from triton.runtime import interpreter

# Checks of every sum of whole numbers take half of the time; no tensor here is that large.
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)

_patched: set[str] = set()


def call_within_a_kernel(function: Any, *arguments: Any, **named: Any) -> Any:
    module = function.fn.__module__
    if module.startswith("triton.") and module not in _patched:
        interpreter._patch_lang(function.fn)
        _patched.add(module)
    return function.rewrite()(*arguments, **named)


# The interpreter replaces all of triton.language anew for each call of a function: 7 ms a call. The
# kernel that calls has done so, and what Triton's own functions use stays replaced.
interpreter.InterpretedFunction.__call__ = call_within_a_kernel


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
