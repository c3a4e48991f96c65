"""Contenders: every way in which the ranks at hand can do an operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from metainfer.comm.algorithms import ALL_REDUCES, refusal
from metainfer.comm.contest import Contender
from metainfer.comm.host_memory import HostMemoryGroup
from metainfer.comm.library import LibraryGroup
from metainfer.comm.transport_group import TransportGroup
from metainfer.comm.wire import wire_of
from metainfer.hardware.curves import NCCL
from metainfer.plan.foretold import NCCL_SUMMED, ONE_KERNEL
from metainfer.plan.ways import ONE_SHOT, SHARED, TWO_SHOT
from metainfer.plan.wires import BLOCK, PLAIN


def contenders_on_cpus(
    shared: HostMemoryGroup, library: LibraryGroup | None, wires: Iterable[str] = (PLAIN,)
) -> list[Contender]:
    """All that ranks without GPUs can do."""
    row = torch.empty(BLOCK, dtype=torch.bfloat16)
    wires, found = tuple(wires), []
    for wire in wires:
        for name in ALL_REDUCES:
            if refusal(name, shared.size, wire_of(wire, row)) is None:
                found.append(_summing(shared, name, wire, name))
        run = partial(shared.reduce_scatter_by, wire=wire)
        found.append(Contender(_named(SHARED, wire), "reduce_scatter", run, wire))
    found += _moving(shared, SHARED)
    if library is not None:
        for wire in wires:
            found += _summing_by_library(library, wire, "gloo, summed here", "gloo")
        run = partial(library.all_reduce_by, False)
        found += [Contender("gloo", "all_reduce", run, ordered=False), *_moving(library, "gloo")]
    return found


def contenders_on_devices(
    by_means: Mapping[str, TransportGroup],
    kernels: Mapping[str, TransportGroup],
    wires: Iterable[str] = (PLAIN,),
) -> list[Contender]:
    """What GPUs that reach each other's memory, or the same memory of the host, can do.

    Args:
        by_means: groups whose bytes move so, for prefill.
        kernels: groups whose sums of decode are made in one kernel, by its means.
    """
    wires = tuple(wires)
    found = []
    for means, group in by_means.items():
        direct = f"direct by {means}"
        for wire in wires:
            for name in (ONE_SHOT, TWO_SHOT):
                found.append(_summing(group, name, wire, f"{name} by {means}"))
            run = partial(group.reduce_scatter_by, wire=wire)
            found.append(Contender(_named(direct, wire), "reduce_scatter", run, wire))
        found += _moving(group, direct)
    for means, group in kernels.items():
        found.append(Contender(f"{ONE_KERNEL} by {means}", "all_reduce", group.all_reduce))
    return found


def contenders_by_nccl(library: LibraryGroup, wires: Iterable[str] = (PLAIN,)) -> list[Contender]:
    """What NCCL does, or another library in its place."""
    found = _moving(library, NCCL)
    for wire in wires:
        found += _summing_by_library(library, wire, NCCL_SUMMED, NCCL_SUMMED)
        # Where nothing else is known. What travels in 8 bits is summed here in any case.
        sums = partial(library.all_reduce_by, False, wire=wire)
        parts = partial(library.reduce_scatter_by, False, wire=wire)
        found += [
            Contender(_named(NCCL, wire), "all_reduce", sums, wire, ordered=wire != PLAIN),
            Contender(_named(NCCL, wire), "reduce_scatter", parts, wire, ordered=wire != PLAIN),
        ]
    return found


def _moving(group: TransportGroup | LibraryGroup, name: str) -> list[Contender]:
    """What moves bytes as they are."""
    return [
        Contender(name, "all_gather", group.all_gather),
        Contender(name, "all_to_all", group.all_to_all),
    ]


def _summing(group: TransportGroup, algorithm: str, wire: str, name: str) -> Contender:
    def run(tensor: torch.Tensor) -> torch.Tensor:
        return group.all_reduce_by(algorithm, tensor, wire)

    return Contender(_named(name, wire), "all_reduce", run, wire)


def _summing_by_library(group: LibraryGroup, wire: str, whole: str, part: str) -> list[Contender]:
    """In the order of ranks; `whole`, `part`: names of an all_reduce and a reduce_scatter."""
    sums = partial(group.all_reduce_by, True, wire=wire)
    parts = partial(group.reduce_scatter_by, True, wire=wire)
    return [
        Contender(_named(whole, wire), "all_reduce", sums, wire),
        Contender(_named(part, wire), "reduce_scatter", parts, wire),
    ]


def _named(name: str, wire: str) -> str:
    """As a table calls it."""
    return name if wire == PLAIN else f"{name} in {wire}"


def way_of(name: str, wire: str) -> str:
    """As a route calls it, which has one wire."""
    return name.removesuffix(f" in {wire}")
