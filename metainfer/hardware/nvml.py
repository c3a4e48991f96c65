"""NVIDIA's management library, called through ctypes. Needs nothing but the driver.

Names of functions and layouts of structures are those of nvml.h. What a card or driver does not
tell is Unknown and says which call failed with what.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Clocks, Power, Process
from metainfer.hardware.pcie import PcieLink

LIBRARY = "libnvidia-ml.so.1"

_SM, _MEMORY = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_ENABLED = 1
_INSUFFICIENT_SIZE = 7
_BUS_LENGTH = 32
_NAME_LENGTH = 96
_SAYS_0 = Unknown("the driver says 0")
_P2P_READ, _P2P_WRITE, _P2P_NVLINK, _P2P_ATOMICS = 0, 1, 2, 3  # nvmlGpuP2PCapsIndex_t
# Arithmetic throughput of fp32 a clock and SM (CUDA C++ Programming Guide); 128 from sm_86 on.
_CORES_OF_SM: Mapping[tuple[int, int], int] = MappingProxyType({(7, 0): 64, (7, 5): 64, (8, 0): 64})
_P2P_STATUS: Mapping[int, str] = MappingProxyType(
    {
        0: "",
        1: "the chipset does not support it",
        2: "the GPU does not support it",
        3: "the topology between them does not support it",
        4: "switched off by a setting of the driver",
        5: "not supported",
        6: "the driver does not know",
    }
)
_THROTTLE: Mapping[int, str] = MappingProxyType(
    {
        0x1: "idle",
        0x2: "clocks set by an application",
        0x4: "power limit",
        0x8: "hardware slowdown",
        0x10: "clocks synchronised with other GPUs",
        0x20: "temperature, by software",
        0x40: "temperature, by hardware",
        0x80: "power brake of the system",
        0x100: "display clocks",
    }
)


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * _BUS_LENGTH),
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t and nvmlBAR1Memory_t: three numbers; of the latter the first is the total."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, third version of the call."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class Nvml:
    """The library, ready to be asked."""

    library: Any

    @classmethod
    def open(cls) -> Nvml | Unknown:
        """Loads and starts the library."""
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return Unknown(f"{LIBRARY}, which comes with the driver, is not installed")
        library.nvmlErrorString.restype = ctypes.c_char_p
        code = library.nvmlInit_v2()
        if code != 0:
            return Unknown(f"the driver's library does not start: {_said(library, code)}")
        return cls(library)

    def driver(self) -> str | Unknown:
        return self._text("nvmlSystemGetDriverVersion", _NAME_LENGTH)

    def cards(self) -> tuple[NvmlCard, ...] | Unknown:
        """All GPUs in the order of the driver."""
        count = self._number("nvmlDeviceGetCount_v2", ctypes.c_uint)
        if isinstance(count, Unknown):
            return count
        found = []
        for place in range(count):
            handle = ctypes.c_void_p()
            code = self.library.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(handle))
            if code != 0:
                return Unknown(f"GPU {place} does not answer: {_said(self.library, code)}")
            found.append(NvmlCard(self, handle))
        return tuple(found)

    def card(self, uuid: str) -> NvmlCard | None:
        """The GPU with this identity ("GPU-..."); None where there is none."""
        handle = ctypes.c_void_p()
        ask = self.library.nvmlDeviceGetHandleByUUID
        return NvmlCard(self, handle) if ask(uuid.encode(), ctypes.byref(handle)) == 0 else None

    def _number(self, call: str, kind: Any, *arguments: Any) -> int | Unknown:
        value = kind()
        return self._ask(call, value, *arguments) or value.value

    def _text(self, call: str, length: int, *arguments: Any) -> str | Unknown:
        buffer = ctypes.create_string_buffer(length)
        failed = self._ask(call, buffer, *arguments, after=(length,))
        return failed or buffer.value.decode(errors="replace")

    def _ask(
        self, call: str, value: Any, *arguments: Any, after: tuple[Any, ...] = ()
    ) -> Unknown | None:
        """Have `call` fill in `value`, by reference; None where it did."""
        function = getattr(self.library, call, None)
        if function is None:
            return Unknown(f"this driver has no {call}")
        given = value if isinstance(value, ctypes.Array) else ctypes.byref(value)
        code = function(*arguments, given, *after)
        return None if code == 0 else Unknown(f"{call}: {_said(self.library, code)}")


@dataclass(frozen=True, slots=True)
class NvmlCard:
    """One GPU."""

    nvml: Nvml
    handle: Any

    def name(self) -> str | Unknown:
        return self.nvml._text("nvmlDeviceGetName", _NAME_LENGTH, self.handle)

    def uuid(self) -> str | Unknown:
        return self.nvml._text("nvmlDeviceGetUUID", _NAME_LENGTH, self.handle)

    def capability(self) -> tuple[int, int] | Unknown:
        major, minor = ctypes.c_int(), ctypes.c_int()
        ask = self.nvml.library.nvmlDeviceGetCudaComputeCapability
        code = ask(self.handle, ctypes.byref(major), ctypes.byref(minor))
        if code != 0:
            return Unknown(f"its compute capability: {_said(self.nvml.library, code)}")
        return major.value, minor.value

    def memory(self) -> tuple[int, int] | Unknown:
        """(bytes of it, free bytes)."""
        memory = self._structure("nvmlDeviceGetMemoryInfo", _Memory())
        return memory if isinstance(memory, Unknown) else (memory.total, memory.free)

    def bar1_bytes(self) -> int | Unknown:
        window = self._structure("nvmlDeviceGetBAR1MemoryInfo", _Memory())
        return window if isinstance(window, Unknown) else int(window.total)

    def bus_id(self) -> str | Unknown:
        """Such as "0000:41:00.0", as sysfs names it."""
        info = self._structure("nvmlDeviceGetPciInfo_v3", _PciInfo())
        if isinstance(info, Unknown):
            return info
        return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"

    def multiprocessors(self) -> int | Unknown:
        """From the number of cores: there is no call for SMs."""
        capability, cores = self.capability(), self._number("nvmlDeviceGetNumGpuCores")
        if isinstance(capability, Unknown) or isinstance(cores, Unknown):
            return capability if isinstance(capability, Unknown) else cores
        return cores // _CORES_OF_SM.get(capability, 128) or _SAYS_0

    def memory_bytes_per_s(self) -> float | Unknown:
        """Nominal: the bus at the most that the memory's clock goes to, two transfers a clock."""
        width = self._number("nvmlDeviceGetMemoryBusWidth")
        mhz = self.clocks().most_memory_mhz
        if isinstance(width, Unknown) or isinstance(mhz, Unknown):
            return width if isinstance(width, Unknown) else mhz
        return width / 8 * mhz * 1e6 * 2 or _SAYS_0

    def link(self) -> PcieLink:
        def ask(call: str) -> int | Unknown:
            return self._number(call) or _SAYS_0  # below some virtual machines

        return PcieLink(
            generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            most_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            most_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        )

    def clocks(self) -> Clocks:
        def mhz(call: str, kind: int) -> int | Unknown:
            return self.nvml._number(call, ctypes.c_uint, self.handle, kind)

        now, most = "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"
        most_sm = mhz(most, _SM) or _SAYS_0
        return Clocks(mhz(now, _SM), mhz(now, _MEMORY), most_sm, mhz(most, _MEMORY))

    def power(self) -> Power:
        def watts(call: str) -> float | Unknown:
            value = self._number(call)
            return value if isinstance(value, Unknown) else value / 1e3

        return Power(
            limit_w=watts("nvmlDeviceGetEnforcedPowerLimit") or _SAYS_0,
            default_limit_w=watts("nvmlDeviceGetPowerManagementDefaultLimit") or _SAYS_0,
            draw_w=watts("nvmlDeviceGetPowerUsage"),
        )

    def energy_j(self) -> float | Unknown:
        """Joules since the driver was loaded; steps of some ten milliseconds."""
        value = self.nvml._number(
            "nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong, self.handle
        )
        return value if isinstance(value, Unknown) else value / 1e3

    def throttle(self) -> tuple[str, ...] | Unknown:
        """Why clocks are lowered now."""
        bits = self.nvml._number(
            "nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong, self.handle
        )
        if isinstance(bits, Unknown):
            return bits
        return tuple(reason for bit, reason in _THROTTLE.items() if bits & bit)

    def ecc(self) -> bool | Unknown:
        return self._mode("nvmlDeviceGetEccMode")

    def mig(self) -> bool | Unknown:
        return self._mode("nvmlDeviceGetMigMode")

    def utilisation(self) -> float | Unknown:
        used = self._structure("nvmlDeviceGetUtilizationRates", _Utilisation())
        return used if isinstance(used, Unknown) else used.gpu / 100

    def processes(self, name_of: Callable[[int], str | Unknown]) -> tuple[Process, ...] | Unknown:
        """Those that compute. `name_of`: a process's name by its number."""
        call = "nvmlDeviceGetComputeRunningProcesses_v3"
        function = getattr(self.nvml.library, call, None)
        if function is None:
            return Unknown(f"this driver has no {call}")
        count = ctypes.c_uint(0)
        code = function(self.handle, ctypes.byref(count), None)
        if code == _INSUFFICIENT_SIZE:
            count.value += 16  # others may start meanwhile
            table = (_Process * count.value)()
            code = function(self.handle, ctypes.byref(count), table)
        else:
            table = (_Process * 0)()
        if code != 0:
            return Unknown(f"{call}: {_said(self.nvml.library, code)}")
        unknown = 2**64 - 1  # what a driver says that may not tell
        return tuple(
            Process(
                entry.pid,
                name_of(entry.pid),
                Unknown("the driver does not say") if entry.memory == unknown else entry.memory,
            )
            for entry in table[: count.value]
        )

    def p2p(self, other: NvmlCard) -> tuple[bool | Unknown, str, bool | Unknown]:
        """(whether it reads and writes the other's memory, why not, whether atomics work there)."""
        reads, writes = self._p2p(other, _P2P_READ), self._p2p(other, _P2P_WRITE)
        atomics = self._p2p(other, _P2P_ATOMICS)
        allowed_atomics = atomics if isinstance(atomics, Unknown) else atomics == ""
        for status in (reads, writes):
            if isinstance(status, Unknown):
                return status, "", allowed_atomics
            if status:
                return False, status, allowed_atomics
        return True, "", allowed_atomics

    def nvlink(self, other: NvmlCard) -> bool | Unknown:
        status = self._p2p(other, _P2P_NVLINK)
        return status if isinstance(status, Unknown) else status == ""

    def _p2p(self, other: NvmlCard, kind: int) -> str | Unknown:
        """Why it does not work; "" where it does."""
        status = self.nvml._number(
            "nvmlDeviceGetP2PStatus", ctypes.c_int, self.handle, other.handle, kind
        )
        if isinstance(status, Unknown):
            return status
        return _P2P_STATUS.get(status, f"status {status}")

    def _number(self, call: str) -> int | Unknown:
        return self.nvml._number(call, ctypes.c_uint, self.handle)

    def _structure(self, call: str, value: Any) -> Any:
        return self.nvml._ask(call, value, self.handle) or value

    def _mode(self, call: str) -> bool | Unknown:
        now, pending = ctypes.c_uint(), ctypes.c_uint()
        function = getattr(self.nvml.library, call, None)
        if function is None:
            return Unknown(f"this driver has no {call}")
        code = function(self.handle, ctypes.byref(now), ctypes.byref(pending))
        if code != 0:
            return Unknown(f"{call}: {_said(self.nvml.library, code)}")
        return now.value == _ENABLED


def _said(library: Any, code: int) -> str:
    """The library's own words for a code."""
    return str(library.nvmlErrorString(code).decode(errors="replace"))
