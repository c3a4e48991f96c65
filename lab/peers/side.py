"""Side: one engine in a process of its own, which answers in JSON lines."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.core.env import child_environment
from metainfer.core.errors import UserError

_LONGEST_WORK_S = 1800.0
_MOST_STDERR_LINES = 8


@dataclass(frozen=True, slots=True)
class SideSpec:
    """How to start a side: its title, the Python that has it, the worker and what that is told."""

    title: str
    python: Path
    worker: str
    setup: Mapping[str, Any]


class Side:
    """The parent's end.

    Attributes:
        load_s: seconds from the checkpoint's files to a model that can run.
        about: what the side says of itself: versions, plan.
    """

    def __init__(self, spec: SideSpec, process: subprocess.Popen[str], log: Path) -> None:
        self.title = spec.title
        self._process = process
        self._log = log
        ready = self._read()
        self.load_s: float = ready["load_s"]
        self.about: dict[str, Any] = ready["about"]

    def ask(self, do: str, prompt: list[int], argument: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        command = json.dumps({"do": do, "prompt": prompt, "argument": argument})
        with suppress(BrokenPipeError):  # it has died: what it said last is read below
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        return self._read()

    def peak_bytes(self) -> int:
        """Most memory that its process has held at once, files that it maps included."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], _LONGEST_WORK_S)
        line = stdout.readline() if readable else ""
        if line:
            record: dict[str, Any] = json.loads(line)
            return record
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise UserError(
            f"{self.title} {'ended' if readable else 'does not answer'}",
            hint="\n".join(said[-_MOST_STDERR_LINES:]) or None,
        )


@contextmanager
def running(spec: SideSpec, threads: int) -> Iterator[Side]:
    """Start a side's process and end it in any case."""
    worker = Path(__file__).parent / spec.worker
    with tempfile.TemporaryDirectory(prefix="metainfer-peer-") as directory:
        log = Path(directory) / "stderr"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [str(spec.python), str(worker), json.dumps(dict(spec.setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=child_environment(OMP_NUM_THREADS=str(threads)),
            )
        try:
            yield Side(spec, process, log)
        finally:
            process.kill()
            process.communicate()
