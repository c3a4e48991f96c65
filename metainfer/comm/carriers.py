"""Carriers: all that can carry the collectives of a group, of which routes choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from metainfer.comm.contenders import (
    contenders_by_nccl,
    contenders_on_cpus,
    contenders_on_devices,
)
from metainfer.comm.contest import Contender
from metainfer.comm.device_memory import DeviceGroup, Rows
from metainfer.comm.host_memory import HostMemoryGroup
from metainfer.comm.library import LibraryGroup
from metainfer.comm.queue import Queue
from metainfer.comm.watch import Watch
from metainfer.hardware.curves import LOAD, NCCL
from metainfer.kernels.triton.launch import Launcher
from metainfer.plan.wires import PLAIN


class Carriers(Protocol):
    """Attributes:
    base: for what has no route: sends, objects, groups of other sizes.
    fallback: the way of an operation whose chosen one brings wrong data; "" for none.
    """

    @property
    def base(self) -> HostMemoryGroup | LibraryGroup: ...

    @property
    def fallback(self) -> str: ...

    def contenders(self) -> list[Contender]:
        """All ranks call it once, of a group that has routes."""

    def part(self, ranks: Sequence[int], least: int) -> Carriers:
        """`least`: ranks of groups that have routes."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CpuCarriers:
    """Of ranks on CPUs.

    Attributes:
        library: gloo, where a route takes it.
    """

    base: HostMemoryGroup
    library: LibraryGroup | None = None
    fallback: str = ""

    def contenders(self) -> list[Contender]:
        return contenders_on_cpus(self.base, self.library, dict.fromkeys((PLAIN, self.base.wire)))

    def part(self, ranks: Sequence[int], least: int) -> CpuCarriers:
        library = self.library
        if library is not None:
            library = library.part(ranks) if len(ranks) >= least else None
        return CpuCarriers(self.base.part(ranks), library)

    def close(self) -> None:
        if self.library is not None:
            self.library.close()
        self.base.close()


@dataclass(frozen=True, slots=True)
class Devices:
    """What groups of GPUs are made of, where routes take them.

    Attributes:
        watch: of this rank.
        means: by which bytes move in prefill.
        kernels: by which sums of decode are made in one kernel, started by `launch`.
    """

    queue: Queue
    watch: Watch
    means: tuple[str, ...]
    kernels: tuple[str, ...]
    launch: Launcher


@dataclass(frozen=True, slots=True)
class GpuCarriers:
    """Of ranks with GPUs.

    Attributes:
        base: NCCL.
        host: the same members.
        groups: of GPUs that reach each other's memory, once there are contenders.
    """

    base: LibraryGroup
    host: HostMemoryGroup
    devices: Devices
    groups: list[DeviceGroup] = field(default_factory=list)
    fallback: str = NCCL

    def contenders(self) -> list[Contender]:
        """Raises MetainferError: a GPU does not reach another's memory."""
        moving = {means: self._group(means, None) for means in self.devices.means}
        kernels = {
            means: self._group(LOAD, Rows(means, self.devices.launch))
            for means in self.devices.kernels
        }
        wires = tuple(dict.fromkeys((PLAIN, self.base.wire)))
        return [
            *contenders_on_devices(moving, kernels, wires),
            *contenders_by_nccl(self.base, wires),
        ]

    def _group(self, means: str, rows: Rows | None) -> DeviceGroup:
        host = self.host.part(range(self.host.size))
        one = self.devices
        made = DeviceGroup(one.queue, host, one.watch, means, self.base.wire, rows)
        self.groups.append(made)
        return made

    def part(self, ranks: Sequence[int], least: int) -> GpuCarriers:
        return GpuCarriers(self.base.part(ranks), self.host.part(ranks), self.devices)

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self.base.close()
        self.host.close()
