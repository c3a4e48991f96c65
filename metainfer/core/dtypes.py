"""Names and sizes of number formats, without torch."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """A stored number format, spelled as safetensors headers spell it."""

    F32 = "F32"
    BF16 = "BF16"
    F16 = "F16"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    I8 = "I8"
    U8 = "U8"
    I32 = "I32"
    I64 = "I64"

    @property
    def size_bytes(self) -> int:
        """Bytes per element."""
        return _SIZE_BYTES[self]


_SIZE_BYTES = {
    DType.F32: 4,
    DType.BF16: 2,
    DType.F16: 2,
    DType.F8_E4M3: 1,
    DType.F8_E8M0: 1,
    DType.I8: 1,
    DType.U8: 1,
    DType.I32: 4,
    DType.I64: 8,
}
