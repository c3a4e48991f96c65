"""Numbers with units, written for people. Bytes are decimal (1 GB = 10^9 bytes)."""

from __future__ import annotations

_STEPS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def format_bytes(count: int) -> str:
    """159609485896 -> "159.6 GB", 512 -> "512 B"."""
    return _scaled(count, "B")


def format_flops(count: int) -> str:
    """78400000000 -> "78.4 GFLOP"; additions and multiplications, not a rate."""
    return _scaled(count, "FLOP")


def format_count(count: int) -> str:
    """1048576 -> "1,048,576"."""
    return f"{count:,}"


def format_seconds(seconds: float) -> str:
    """0.0123 -> "12.3 ms", 3.4 -> "3.4 s", 125 -> "2 min 05 s"."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _scaled(count: int, unit: str) -> str:
    for size, prefix in _STEPS:
        # What would round to "1000.0 kB" is written in the next larger unit.
        if abs(count) >= size * 0.99995:
            return f"{count / size:.1f} {prefix}{unit}"
    return f"{count} {unit}"
