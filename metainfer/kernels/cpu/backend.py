"""How this package declares a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from metainfer.kernels.registry import YES, Backend, Verdict, no
from metainfer.ops.base import Target


def on_cpu(case: Any, target: Target) -> Verdict:
    """Serves every case on the CPU."""
    return YES if target.type == "cpu" else no("runs on the CPU alone")


def cpu_backend(
    op: str,
    run: Callable[..., Any],
    prepare: Callable[..., Any] | None = None,
    eligible: Callable[[Any, Target], Verdict] = on_cpu,
) -> Backend:
    """The backend of `op` that keeps its weights as they are stored."""
    return Backend(op, "cpu", run, eligible, prepare)


def expanded_backend(op: str, run: Callable[..., Any], prepare: Callable[..., Any]) -> Backend:
    """The backend of `op` whose weights are unpacked to the compute dtype once."""
    return Backend(op, "cpu_expanded", run, on_cpu, prepare, expands=True)
