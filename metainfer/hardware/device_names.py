"""Names of devices in flags and plans: "cpu", "cuda", or "cuda:1" for one GPU of several.

GPUs count as the driver shows them to this process.
"""

from __future__ import annotations

import re

from metainfer.core.config import AUTO
from metainfer.core.errors import UserError

_NAME = re.compile(r"cpu|cuda(?::(\d+))?")


def parse_device(text: str) -> str | None:
    """The name of a device; None for "auto". Raises UserError."""
    if text == AUTO:
        return None
    if _NAME.fullmatch(text) is None:
        raise UserError(f"'{text}' is no device", hint="devices are cpu, cuda, cuda:0, cuda:1, ...")
    return text


def gpu_number(name: str) -> int | None:
    """Which GPU a name means; None where it names none in particular."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and match[1] is not None else None
