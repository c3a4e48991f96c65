"""What NVIDIA's management library tells of one GPU: energy taken, clocks. Needs nothing but the
driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_CLOCKS = {"sm_mhz": 1, "memory_mhz": 2}


@dataclass(frozen=True, slots=True)
class Nvml:
    """One GPU. What the card does not tell is None."""

    _library: Any
    _handle: Any

    @classmethod
    def open(cls, uuid: str) -> Nvml | None:
        """The GPU with this identity ("GPU-..."); None where there is no such library or card."""
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return None
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() != 0:
            return None
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
            return None
        return cls(library, handle)

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded; steps of some ten milliseconds."""
        millijoules = ctypes.c_ulonglong()
        ask = self._library.nvmlDeviceGetTotalEnergyConsumption
        if ask(self._handle, ctypes.byref(millijoules)) != 0:
            return None
        return millijoules.value / 1e3

    def clocks(self) -> dict[str, int]:
        """MHz as of now."""
        found = {}
        for name, kind in _CLOCKS.items():
            value = ctypes.c_uint()
            if self._library.nvmlDeviceGetClockInfo(self._handle, kind, ctypes.byref(value)) == 0:
                found[name] = value.value
        return found
