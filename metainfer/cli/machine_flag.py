"""`--machine`: of the verbs that look at a machine, which may be a recorded one."""

from __future__ import annotations

from typing import Any

from metainfer.core.config import flag


def machine_flag() -> Any:
    """The field of a verb's record; `metainfer.hardware.known.machine_of` makes the Machine."""
    return flag(
        "--machine",
        "A record of `metainfer probe --out`, or the name of a recorded machine (a wrong name lists"
        " them), in place of the machine at hand",
        unit="file|name",
    )
