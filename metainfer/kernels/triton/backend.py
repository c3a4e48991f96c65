"""How this package declares a backend, and how a launcher turns declarations into backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from metainfer.kernels.registry import YES, Backend, Variant, Verdict, no
from metainfer.kernels.triton.launch import TARGETS, Launcher
from metainfer.ops.base import Target

NAME = "triton"

Eligible = Callable[[Any, Target], Verdict]


def on_gpu(case: Any, target: Target) -> Verdict:
    """Serves every case on the GPUs that kernels are written for, and on newer ones."""
    if target.type != "cuda" or target.capability is None:
        return no("runs on NVIDIA GPUs alone")
    if target.capability < min(TARGETS):
        return no(f"is written for sm_{min(TARGETS)[0]}{min(TARGETS)[1]} and newer")
    return YES


@dataclass(frozen=True, slots=True)
class Declared:
    """A backend without its launcher: `run(launch, case, *arguments)`, its variants likewise."""

    op: str
    run: Callable[..., Any]
    eligible: Eligible = on_gpu
    prepare: Callable[..., Any] | None = None
    name: str = NAME
    holds: Mapping[str, Callable[[Any], Any]] = field(default_factory=lambda: _NOTHING)
    variants: Mapping[str, Variant] = field(default_factory=lambda: _NOTHING)

    def bind(self, launch: Launcher) -> Backend:
        variants = {
            name: replace(one, run=partial(one.run, launch)) for name, one in self.variants.items()
        }
        return Backend(
            self.op,
            self.name,
            partial(self.run, launch),
            self.eligible,
            self.prepare,
            holds=self.holds,
            variants=MappingProxyType(variants),
        )


_NOTHING: Mapping[str, Any] = MappingProxyType({})
