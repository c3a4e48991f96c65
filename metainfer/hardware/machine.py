"""Machine: what the probe learnt of the machine, as a record that goes through JSON and back.

What could not be learnt is `Unknown` and says why; nothing is guessed. A plan can be made from a
recorded machine anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from metainfer.core.errors import UserError
from metainfer.hardware.coherence import require_coherent
from metainfer.hardware.curves import Curve, Rate
from metainfer.hardware.facts import NOT_ASKED, Unknown, plain, record_of
from metainfer.hardware.pcie import Bridge, PcieLink, Peer

__all__ = ["Bridge", "Clocks", "Cpu", "Curve", "Gpu", "Host", "Machine", "Memory", "NumaNode",
           "PcieLink", "Peer", "Power", "Process", "Rate", "Source", "Unknown",
           "gpus_of"]  # fmt: skip

MACHINE_VERSION = 2
_AMD = ("AMD", "EPYC", "Threadripper", "Ryzen")


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor, as far as this process may use it.

    Attributes:
        model: as it calls itself.
        physical_cores, logical_cores: those that affinity and quota leave to this process, at
            least 1.
        quota_cores: processor time that a cgroup grants, in cores; None without a limit.
        isa: extensions that matter to matrix products, such as "avx512_bf16", sorted.
    """

    model: str | Unknown
    physical_cores: int
    logical_cores: int
    quota_cores: float | None
    isa: tuple[str, ...] | Unknown

    @property
    def of_amd(self) -> bool | None:
        """Whether AMD made it, which NCCL asks too; None where the record does not name it."""
        if isinstance(self.model, Unknown):
            return None
        return any(word in self.model for word in _AMD)


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory in bytes, as far as this process may use it.

    Attributes:
        total_bytes: of the machine, or the limit where that is less.
        available_bytes: what may still be taken without swapping.
        limit_bytes: what a cgroup grants in all; None where that is no less than the machine has.
    """

    total_bytes: int | Unknown
    available_bytes: int | Unknown
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Attributes:
    number: as the system counts.
    cpus: logical processors.
    memory_bytes: of it.
    """

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int | Unknown


@dataclass(frozen=True, slots=True)
class Host:
    """What of the host decides how GPUs talk to each other.

    Attributes:
        board: of the system, as its firmware says.
        sockets: processors.
        memory_bytes_per_s: nominal, of all channels.
        iommu: "off", "passthrough" or "translating".
        hmm: whether the driver shares page tables with the system.
        kernel_parameters: of those the system was started with, the ones that bear on devices and
            memory.
        relaxed_p2p: the driver was told to allow peer access that it does not offer by itself.
    """

    board: str | Unknown = NOT_ASKED
    sockets: int | Unknown = NOT_ASKED
    numa_nodes: tuple[NumaNode, ...] | Unknown = NOT_ASKED
    memory_bytes_per_s: float | Unknown = NOT_ASKED
    iommu: str | Unknown = NOT_ASKED
    hmm: bool | Unknown = NOT_ASKED
    kernel_parameters: str | Unknown = NOT_ASKED
    relaxed_p2p: bool | Unknown = NOT_ASKED


@dataclass(frozen=True, slots=True)
class Clocks:
    """In MHz: now, and the most that the card goes to."""

    sm_mhz: int | Unknown
    memory_mhz: int | Unknown
    most_sm_mhz: int | Unknown = NOT_ASKED
    most_memory_mhz: int | Unknown = NOT_ASKED


@dataclass(frozen=True, slots=True)
class Power:
    """In watts: the limit in force, the one that the card comes with, and what it draws now."""

    limit_w: float | Unknown
    default_limit_w: float | Unknown = NOT_ASKED
    draw_w: float | Unknown = NOT_ASKED


@dataclass(frozen=True, slots=True)
class Process:
    """Something that holds memory of a GPU. `name`: without its arguments."""

    pid: int
    name: str | Unknown
    memory_bytes: int | Unknown


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator.

    Attributes:
        capability: compute capability, such as (9, 0).
        memory_bytes, free_bytes: of the device, and not in use when it was asked.
        multiprocessors: SMs.
        shared_block_bytes: shared memory that one block may use.
        memory_bytes_per_s: nominal, from clock and width of the bus.
        bus_id: such as "0000:41:00.0".
        parent: name of the bridge that it hangs at; None: of the root itself.
        bar1_bytes: window through which others see its memory.
        throttle: reasons for which clocks are lowered now; () for none.
        ecc, mig: on or off.
        utilisation: share of the last second in which a kernel ran, 0 to 1.
        processes: that hold its memory.
        uuid: by which CUDA_VISIBLE_DEVICES may name it, such as "GPU-8d2c...".
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    free_bytes: int
    multiprocessors: int | Unknown = NOT_ASKED
    shared_block_bytes: int | Unknown = NOT_ASKED
    memory_bytes_per_s: float | Unknown = NOT_ASKED
    bus_id: str | Unknown = NOT_ASKED
    parent: str | Unknown | None = NOT_ASKED
    numa_node: int | Unknown = NOT_ASKED
    link: PcieLink | Unknown = NOT_ASKED
    bar1_bytes: int | Unknown = NOT_ASKED
    clocks: Clocks | Unknown = NOT_ASKED
    power: Power | Unknown = NOT_ASKED
    throttle: tuple[str, ...] | Unknown = NOT_ASKED
    ecc: bool | Unknown = NOT_ASKED
    mig: bool | Unknown = NOT_ASKED
    utilisation: float | Unknown = NOT_ASKED
    processes: tuple[Process, ...] | Unknown = NOT_ASKED
    uuid: str | Unknown = NOT_ASKED


@dataclass(frozen=True, slots=True)
class Source:
    """Where fields of a recorded machine are from.

    Attributes:
        fields: by name, such as "gpus.link"; "" for the whole.
        source: an address or document.
        inferred: what was concluded rather than read, in a sentence; "" for nothing.
    """

    fields: str
    source: str
    inferred: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """One host.

    Attributes:
        system: operating system, release and architecture.
        gpus: in the order of the driver; () only where the driver lists none.
        driver: version of the GPU driver.
        versions: of Python and of the packages that a result depends on, by name.
        host: what decides how GPUs talk to each other.
        bridges: of the PCIe tree above GPUs.
        peers: what the driver says of each ordered pair of GPUs.
        nvlink: whether any two GPUs are linked by NVLink.
        environment: variables of NCCL, CUDA and PyTorch that this process inherited.
        curves, rates: measured, or published of a machine like it.
        unmeasured: what was to be measured and was not, each in a sentence with the reason.
        sources: of a recorded machine.
    """

    system: str
    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...] | Unknown
    driver: str | Unknown
    versions: Mapping[str, str]
    host: Host = Host()
    bridges: tuple[Bridge, ...] | Unknown = NOT_ASKED
    peers: tuple[Peer, ...] | Unknown = NOT_ASKED
    nvlink: bool | Unknown = NOT_ASKED
    environment: Mapping[str, str] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    rates: tuple[Rate, ...] = ()
    unmeasured: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"version": MACHINE_VERSION, **plain(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Raises UserError naming what is unknown, missing, of a wrong type, another version or
        such as no machine has."""
        try:
            record = json.loads(text)
        except RecursionError as error:
            raise UserError(
                "the machine is not a JSON record", hint="it is nested too deeply"
            ) from error
        except ValueError as error:
            why = str(error).partition(";")[0]  # behind it Python's advice on long numbers
            raise UserError("the machine is not a JSON record", hint=why) from error
        if not isinstance(record, dict):
            raise UserError("the machine is not a JSON record", hint="it is no object")
        version = record.pop("version", None)
        if version != MACHINE_VERSION:
            raise UserError(
                f"the machine has version {version!r:.40}, this one reads {MACHINE_VERSION}",
                hint="`metainfer probe --out FILE` writes it anew",
            )
        machine: Machine = record_of(cls, record)
        require_coherent(machine)
        return machine


def gpus_of(machine: Machine) -> tuple[Gpu, ...]:
    """Its GPUs; none where nobody could list them."""
    return () if isinstance(machine.gpus, Unknown) else machine.gpus
