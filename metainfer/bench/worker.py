"""One side of `bench model` in a process of its own: JSON lines in on stdin, JSON lines out.

Started by `bench.model`; ends when its stdin does. Its peak memory is that of its side alone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from metainfer.bench.contender import ENGINE, Contender


def main() -> None:
    # Replies go to the real stdout; whatever libraries print goes to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setup = json.loads(sys.argv[1])
    import_libraries(setup["side"])
    libraries_bytes = peak_memory_bytes()
    contender = load(setup)
    _reply(replies, {"dtype": contender.dtype, "libraries_bytes": libraries_bytes})
    for line in sys.stdin:
        _reply(replies, answer(contender, json.loads(line)))


def import_libraries(side: str) -> None:
    """What the side needs before it holds any weight."""
    if side == ENGINE:
        from metainfer.bench import contender_engine  # noqa: F401
    else:
        from metainfer.bench import contender_peer  # noqa: F401


def load(setup: Mapping[str, Any]) -> Contender:
    """The side named in `setup`, with its model loaded."""
    directory, threads = Path(setup["directory"]), setup["threads"]
    if setup["side"] == ENGINE:
        from metainfer.bench.contender_engine import EngineContender

        return EngineContender(directory, threads, setup["max_model_len"], setup["max_num_seqs"])
    from metainfer.bench.contender_peer import PeerContender

    return PeerContender(directory, threads, setup["side"])


def answer(contender: Contender, command: Mapping[str, Any]) -> dict[str, Any]:
    """Do one piece of work."""
    match command["do"]:
        case "prefill":
            return asdict(contender.prefill(command["prompts"][0]))
        case "decode":
            return asdict(contender.decode(command["prompts"], command["count"]))
        case "greedy":
            return {"ids": contender.greedy(command["prompts"][0], command["count"])}
        case "memory":
            return {"peak_bytes": peak_memory_bytes()}
    raise ValueError(f"unknown work {command['do']!r}")


def peak_memory_bytes() -> int:
    """Most memory this process has held at once."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike getrusage, this starts anew at exec and so leaves out the parent's memory.
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reply(replies: Any, record: Mapping[str, Any]) -> None:
    replies.write(json.dumps(record) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
