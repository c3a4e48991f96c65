"""The GPUs, as NVIDIA's driver lists them: through its library, or nvidia-smi where that fails."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metainfer.hardware.machine import Gpu, Peer, Unknown
from metainfer.hardware.nvml import Nvml, NvmlCard

_QUERY = "name,compute_cap,memory.total,memory.free,driver_version"
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Listing:
    """What the driver says. See `Machine` for the fields."""

    gpus: tuple[Gpu, ...] | Unknown
    driver: str | Unknown
    peers: tuple[Peer, ...] | Unknown
    nvlink: bool | Unknown


def read_gpus(root: Path = Path("/")) -> Listing:
    """Everything that the driver tells of its GPUs; does not raise.

    Args:
        root: "/" but for tests; names of processes are read there.
    """
    nvml = Nvml.open()
    cards = nvml if isinstance(nvml, Unknown) else nvml.cards()
    if isinstance(nvml, Unknown) or isinstance(cards, Unknown):
        return _from_tool(cards.why if isinstance(cards, Unknown) else "")
    gpus: list[Gpu] = []
    for card in cards:
        gpu = _gpu(card, root)
        if isinstance(gpu, Unknown):
            return _from_tool(gpu.why)
        gpus.append(gpu)
    return Listing(tuple(gpus), nvml.driver(), _peers(cards), _any_nvlink(cards))


def _gpu(card: NvmlCard, root: Path) -> Gpu | Unknown:
    name, capability, memory = card.name(), card.capability(), card.memory()
    for fact in (name, capability, memory):
        if isinstance(fact, Unknown):
            return fact
    assert isinstance(name, str) and isinstance(capability, tuple) and isinstance(memory, tuple)
    return Gpu(
        name,
        capability,
        *memory,
        multiprocessors=card.multiprocessors(),
        memory_bytes_per_s=card.memory_bytes_per_s(),
        bus_id=card.bus_id(),
        link=card.link(),
        bar1_bytes=card.bar1_bytes(),
        clocks=card.clocks(),
        power=card.power(),
        throttle=card.throttle(),
        ecc=card.ecc(),
        mig=card.mig(),
        utilisation=card.utilisation(),
        processes=card.processes(lambda pid: _process_name(root, pid)),
        uuid=card.uuid(),
    )


def _process_name(root: Path, pid: int) -> str | Unknown:
    try:
        return (root / f"proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return Unknown("it lives outside of this container, or has ended")


def _peers(cards: Sequence[NvmlCard]) -> tuple[Peer, ...]:
    found = []
    for source, one in enumerate(cards):
        for target, other in enumerate(cards):
            if source != target:
                allowed, why, atomics = one.p2p(other)
                found.append(Peer(source, target, allowed, why, atomics))
    return tuple(found)


def _any_nvlink(cards: Sequence[NvmlCard]) -> bool | Unknown:
    if len(cards) < 2:
        return False
    told = [one.nvlink(other) for one in cards for other in cards if one is not other]
    unknown = [fact for fact in told if isinstance(fact, Unknown)]
    return any(fact is True for fact in told) or (unknown[0] if unknown else False)


def _from_tool(why_not_library: str) -> Listing:
    """What nvidia-smi prints, which is less."""
    gpus, driver = read_listing()
    if isinstance(gpus, Unknown):
        return Listing(gpus, driver, gpus, gpus)
    less = Unknown(f"nvidia-smi does not say, and the library fails: {why_not_library}")
    return Listing(gpus, driver, less, False if len(gpus) < 2 else less)


def read_listing() -> tuple[tuple[Gpu, ...] | Unknown, str | Unknown]:
    """(GPUs, version of the driver) from nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        why = Unknown("neither the driver's library nor nvidia-smi is installed")
        return why, why
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = Unknown(f"nvidia-smi does not run: {error}")
        return why, why
    if done.returncode != 0:
        said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[0]
        why = Unknown(f"nvidia-smi ended with code {done.returncode} and said: {said}")
        return why, why
    return parse_listing(done.stdout)


def parse_listing(text: str) -> tuple[tuple[Gpu, ...] | Unknown, str | Unknown]:
    """(GPUs, version of the driver) from the lines that nvidia-smi prints, sizes in MiB."""
    gpus = []
    driver: str | Unknown = Unknown("the driver lists no GPU")
    for cells in csv.reader(text.strip().splitlines(), skipinitialspace=True):
        try:
            name, capability, total, free, driver = cells
            major, minor = map(int, capability.split("."))
            gpus.append(Gpu(name, (major, minor), int(total) * 2**20, int(free) * 2**20))
        except ValueError:
            # Such as "[N/A]" for the memory of a device that shares the host's.
            return Unknown(f"nvidia-smi's line is not understood: {', '.join(cells)}"), driver
    return tuple(gpus), driver
