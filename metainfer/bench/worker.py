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
    cards = Cards.of(contender.gpus)
    for line in sys.stdin:
        try:
            said = cards.measured(answer, contender, json.loads(line))
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


def answer(
    contender: Contender, command: Mapping[str, Any], on_start: Callable[[], None]
) -> dict[str, Any]:
    """Do one piece of work; `on_start` is told when what is timed begins, if that is later."""
    prompts, count = command.get("prompts", ()), command.get("count", 0)
    works: Mapping[str, Callable[[], dict[str, Any]]] = {
        "prefill": lambda: asdict(contender.prefill(prompts[0])),
        "decode": lambda: asdict(contender.decode(prompts, count, on_start)),
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


class Cards:
    """GPUs as their driver sees them, all those that a side works on."""

    def __init__(self, cards: Sequence[NvmlCard]) -> None:
        self._cards = cards
        self._before_j: float | None = None

    @classmethod
    def of(cls, gpus: Sequence[int]) -> Cards:
        """By torch's numbers; none where the driver tells nothing of one of them."""
        nvml = Nvml.open() if gpus else Unknown("there are none")
        if isinstance(nvml, Unknown):
            return cls(())
        import torch

        uuids = [torch.cuda.get_device_properties(gpu).uuid for gpu in gpus]
        found = [nvml.card(f"GPU-{uuid}") for uuid in uuids]
        return cls([card for card in found if card is not None] if all(found) else ())

    def measured(
        self, work: Callable[..., dict[str, Any]], contender: Contender, command: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What the work says, what the cards took together from when it began to be timed, and how
        fast the slowest clocks were at the end."""
        self._mark()
        said = work(contender, command, self._mark)
        if not self._cards:
            return said
        clocks, after_j = [card.clocks() for card in self._cards], self._energy_j()
        if self._before_j is not None and after_j is not None:
            said["joules"] = after_j - self._before_j
        known = {
            "sm_mhz": [n.sm_mhz for n in clocks if not isinstance(n.sm_mhz, Unknown)],
            "memory_mhz": [n.memory_mhz for n in clocks if not isinstance(n.memory_mhz, Unknown)],
        }
        return {**said, "clocks": {name: min(mhz) for name, mhz in known.items() if mhz}}

    def _mark(self) -> None:
        self._before_j = self._energy_j()

    def _energy_j(self) -> float | None:
        """Of all; None where one does not tell."""
        each = [card.energy_j() for card in self._cards]
        told = [joules for joules in each if not isinstance(joules, Unknown)]
        return sum(told) if len(told) == len(each) else None


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
