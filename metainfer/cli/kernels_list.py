"""`metainfer kernels list`: what runs each operation on the CPU and on each kind of card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from metainfer.cli.kernels_text import wrapped
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.kernels.verdict_cache import COMPILERS, keep, key_of, read_kept
from metainfer.ops.targets import CARD_KINDS

if TYPE_CHECKING:
    from metainfer.kernels.registry import Registry
    from metainfer.ops.base import Op, Target

_CPU = "cpu"
_NAME = "list of kernels"
_COLUMN = 40
_LEGEND = (
    "native: C, compiled here; cpu: torch on a CPU; triton: kernels in Triton; cuda: kernels in"
    " CUDA C++; the reference alone: plain torch, slow, and on a GPU never without being named."
    " `metainfer kernels explain OP` says why nothing better."
)


@dataclass(frozen=True, slots=True)
class ListOptions:
    """How it is shown."""

    json: bool = flag("--json", "Print the list as JSON, with all backends", False)


def run(terminal: Terminal, options: ListOptions) -> int:
    if find_spec("triton") is None:
        terminal.hint("without triton no kernel for GPUs is here: pip install 'metainfer[kernels]'")
    key = key_of(map(str, map(shutil.which, COMPILERS)))
    listed = read_kept(_NAME, key)
    if listed is None:
        with terminal.waiting("asking kernels what they take (kept for the next time)"):
            listed = _listed()
        if any("native" in facts["chosen"][_CPU] for facts in listed.values()):
            keep(_NAME, key, listed)  # a C library that cannot be built is tried again
    terminal.data(json.dumps(listed, indent=1) if options.json else _text(listed))
    return 0


def _listed() -> dict[str, dict[str, Any]]:
    """Of each operation its backends, how many cases it has, and what runs them where."""
    from metainfer.kernels.on_paper import has_triton, registry_for
    from metainfer.ops.base import Target
    from metainfer.ops.catalogue import OPS

    has_triton()  # raises where it is broken
    targets = {_CPU: Target(_CPU), **{name: kind.target for name, kind in CARD_KINDS.items()}}
    registries = {name: registry_for(CARD_KINDS.get(name)) for name in targets}
    return {
        op.name: {
            "backends": sorted(
                {n for registry in registries.values() for n in registry.backends(op.name)}
            ),
            "cases": sum(map(len, op.cases.values())),
            "chosen": {n: _chosen(registries[n], op, target) for n, target in targets.items()},
        }
        for op in OPS.values()
    }


def _chosen(registry: Registry, op: Op, target: Target) -> dict[str, int]:
    """How many of the op's cases each backend would run; "" counts those that none would."""
    from metainfer.kernels.on_paper import choose

    counts: dict[str, int] = {}
    for cases in op.cases.values():
        for case in cases:
            choice = choose(registry, op.name, case, target)
            name = "" if choice.is_slow else choice.backend
            counts[name] = counts.get(name, 0) + 1
    return counts


def _text(listed: Mapping[str, Mapping[str, Any]]) -> str:
    """A paragraph an operation, a line for targets that are alike."""
    lines = []
    for op, facts in listed.items():
        count = facts["cases"]
        lines.append(f"{op}, {count} case{'s' * (count != 1)} of known models")
        alike: dict[str, list[str]] = {}
        for target, counts in facts["chosen"].items():
            alike.setdefault(_told(counts), []).append(target)
        lines += [f"  {' '.join(names):<{_COLUMN}}  {told}" for told, names in alike.items()]
    lines += ["", *wrapped(_LEGEND)]
    return "\n".join(lines)


def _told(counts: Mapping[str, int]) -> str:
    words = {name or "the reference alone": count for name, count in counts.items()}
    if len(words) == 1:
        return next(iter(words))
    return ", ".join(f"{count} on {name}" for name, count in words.items())


VERB = Verb(
    "kernels list",
    "List what runs each operation, by kind of card",
    (("how it is shown", ListOptions),),
    run,
    ("metainfer kernels list",),
)
