"""One side of a comparison in a process of its own: JSON lines in on stdin, JSON lines out.

Started by `bench.side_process`; ends when its stdin does. Its peak memory is that of its side
alone. The setup, its argument: {"side": ENGINE, "model", "settings"} for this engine, with "check":
{"tokens", "count", "seed"} where positions are held against the references before it serves; and
{"side": a dtype, "model", "settings", "device", "threads"} for transformers.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from metainfer.bench.contender import ENGINE, Contender
from metainfer.bench.traffic import Arrival
from metainfer.core.errors import MetainferError, UserError
from metainfer.hardware.facts import Unknown
from metainfer.hardware.nvml import Nvml, NvmlCard


def main() -> None:
    # Replies go to the real stdout; whatever libraries print goes to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setup = json.loads(sys.argv[1])
    import_libraries(setup["side"])
    libraries_bytes = peak_memory_bytes()
    import torch

    try:
        contender = load(setup)
    except UserError as error:
        _reply(replies, {"refused": error.message, "hint": error.hint})
        return
    except torch.OutOfMemoryError as error:
        _reply(replies, {"refused": str(error).splitlines()[0], "hint": None})
        return
    ready = {"dtype": contender.dtype, "libraries_bytes": libraries_bytes, **contender.receipt()}
    _reply(replies, ready)
    card = _Card()
    for line in sys.stdin:
        try:
            said = card.measured(answer, contender, json.loads(line))
        except (MetainferError, torch.OutOfMemoryError) as error:
            said = {"failed": (str(error).splitlines() or [type(error).__name__])[0]}
        _reply(replies, said)


def import_libraries(side: str) -> None:
    """What the side needs before it holds any weight."""
    if side == ENGINE:
        from metainfer.bench import contender_engine  # noqa: F401
    else:
        from metainfer.bench import contender_peer  # noqa: F401


def load(setup: Mapping[str, Any]) -> Contender:
    """The side named in `setup`, with its model loaded."""
    model = Path(setup["model"])
    if setup["side"] == ENGINE:
        from metainfer.bench.contender_engine import EngineContender, settings_of

        return EngineContender(model, settings_of(setup["settings"]), setup.get("check"))
    from metainfer.bench.contender_engine import settings_of
    from metainfer.bench.contender_peer import PeerContender

    settings = settings_of(setup["settings"])
    return PeerContender(model, settings, setup["side"], setup["device"], setup["threads"])


def answer(contender: Contender, command: Mapping[str, Any]) -> dict[str, Any]:
    """Do one piece of work."""
    prompts, count = command.get("prompts", ()), command.get("count", 0)
    works: Mapping[str, Callable[[], dict[str, Any]]] = {
        "prefill": lambda: asdict(contender.prefill(prompts[0])),
        "decode": lambda: asdict(contender.decode(prompts, count)),
        "greedy": lambda: {"ids": contender.greedy(prompts[0], count)},
        "score": lambda: {"scores": contender.score(prompts)},
        "traffic": lambda: _traffic(contender, command["arrivals"]),
        "memory": lambda: {
            "peak_bytes": peak_memory_bytes(),
            "device_peak_bytes": device_peak_bytes(),
        },
        "counted": contender.counted,
    }
    return works[command["do"]]()


def _traffic(contender: Contender, arrivals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    served = contender.traffic([Arrival(**arrival) for arrival in arrivals])
    return {"served": [asdict(one) for one in served]}


class _Card:
    """The GPU that torch uses, as its driver sees it; nothing where there is none."""

    def __init__(self) -> None:
        import torch

        self._card: NvmlCard | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            nvml = Nvml.open()
            if not isinstance(nvml, Unknown):
                self._card = nvml.card(f"GPU-{torch.cuda.get_device_properties().uuid}")

    def measured(
        self, work: Callable[..., dict[str, Any]], contender: Contender, command: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What the work says, and what the card took and how fast its clocks were at the end."""
        if self._card is None:
            return work(contender, command)
        before_j = self._card.energy_j()
        said = work(contender, command)
        clocks, after_j = self._card.clocks(), self._card.energy_j()
        if not isinstance(before_j, Unknown) and not isinstance(after_j, Unknown):
            said["joules"] = after_j - before_j
        now = {"sm_mhz": clocks.sm_mhz, "memory_mhz": clocks.memory_mhz}
        return {**said, "clocks": {k: v for k, v in now.items() if not isinstance(v, Unknown)}}


def peak_memory_bytes() -> int:
    """Most memory this process has held at once."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike getrusage, this starts anew at exec and so leaves out the parent's memory.
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_peak_bytes() -> int | None:
    """Most memory of a GPU that torch's tensors took at once; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None


def _reply(replies: Any, record: Mapping[str, Any]) -> None:
    replies.write(json.dumps(record) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
