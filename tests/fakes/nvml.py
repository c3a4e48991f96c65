"""The driver's library for cards that nobody has: calls of `hardware.nvml`, from a table."""

from __future__ import annotations

import ctypes
from typing import Any

NOT_SUPPORTED = 3


class FakeCard:
    """`facts`: values by the call that tells them; a call without one is not supported."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts


class FakeLibrary:
    """`p2p`: (source, target, kind) -> status; 0 where none is given."""

    def __init__(
        self,
        cards: list[FakeCard],
        p2p: dict[tuple[int, int, int], int] | None = None,
        driver: bytes = b"580.95.05",
    ) -> None:
        self.cards, self.statuses, self.driver = cards, p2p or {}, driver

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlErrorString(self, code: int) -> bytes:
        return {NOT_SUPPORTED: b"Not Supported"}.get(code, b"Unknown Error")

    def nvmlSystemGetDriverVersion(self, buffer: Any, length: int) -> int:
        buffer.value = self.driver
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, place: int, handle: Any) -> int:
        handle._obj.value = place + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._card(handle).facts["capability"]
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, kind: int, status: Any) -> int:
        status._obj.value = self.statuses.get((one.value - 1, other.value - 1, kind), 0)
        return 0

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, value: Any) -> int:
        return self._fill(handle, f"clock_{kind}", value)

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, value: Any) -> int:
        return self._fill(handle, f"most_clock_{kind}", value)

    def nvmlDeviceGetEccMode(self, handle: Any, now: Any, pending: Any) -> int:
        return self._fill(handle, "nvmlDeviceGetEccMode", now)

    def nvmlDeviceGetMigMode(self, handle: Any, now: Any, pending: Any) -> int:
        return self._fill(handle, "nvmlDeviceGetMigMode", now)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, table: Any) -> int:
        held = self._card(handle).facts.get("processes", ())
        if table is None or len(table) < len(held):
            count._obj.value = len(held)
            return 7 if held else 0
        for entry, (pid, memory) in zip(table, held, strict=False):
            entry.pid, entry.memory = pid, memory
        count._obj.value = len(held)
        return 0

    def __getattr__(self, call: str) -> Any:
        if not call.startswith("nvmlDeviceGet") or call == "nvmlDeviceGetBoardId":
            raise AttributeError(call)
        return lambda handle, value, *length: self._fill(handle, call, value)

    def _fill(self, handle: Any, call: str, value: Any) -> int:
        facts = self._card(handle).facts
        if call not in facts:
            return NOT_SUPPORTED
        if isinstance(value, ctypes.Array):
            value.value = facts[call]
        elif isinstance(facts[call], dict):
            for name, number in facts[call].items():
                setattr(value._obj, name, number)
        else:
            value._obj.value = facts[call]
        return 0

    def _card(self, handle: Any) -> FakeCard:
        return self.cards[handle.value - 1]
