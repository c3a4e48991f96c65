"""One side of a comparison in a process of its own: it stays loaded, and waits while others work.

The parent imports no torch.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from metainfer.core.env import child_environment
from metainfer.core.errors import UserError

_LONGEST_WORK_S = 600.0
_MOST_STDERR_LINES = 5


class Refused(UserError):
    """A side said why it does not start, such as that its model does not fit."""


class SideProcess:
    """The parent's end.

    Attributes:
        title: what the side is called.
        ready: what it said of itself once it was loaded.
    """

    def __init__(self, title: str, process: subprocess.Popen[str], log: Path) -> None:
        self.title = title
        self._process = process
        self._log = log
        self.ready = self._read()
        if "refused" in self.ready:
            raise Refused(f"{title}: {self.ready['refused']}", self.ready["hint"])

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Let it do a piece of work and return what it says, with "failed" in it if it could not.

        Raises UserError if it ends or takes too long.
        """
        assert self._process.stdin is not None
        command = json.dumps({"do": do, **arguments})
        with suppress(BrokenPipeError):  # it has died: what it said last is read below
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        return self._read()

    def must(self, do: str, **arguments: Any) -> dict[str, Any]:
        """As `ask`, of work that has to succeed."""
        said = self.ask(do, **arguments)
        if "failed" in said:
            raise UserError(f"{self.title}: {said['failed']}")
        return said

    def _read(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], _LONGEST_WORK_S)
        line = stdout.readline() if readable else ""
        if line:
            record: dict[str, Any] = json.loads(line)
            return record
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        how = "ended" if readable else f"did not answer within {_LONGEST_WORK_S:g} s"
        raise UserError(
            f"{self.title} {how}: {said[-1] if said else 'no output'}",
            hint="\n".join(said[-_MOST_STDERR_LINES:]) or None,
        )


@contextmanager
def side_process(title: str, setup: Mapping[str, Any], threads: int) -> Iterator[SideProcess]:
    """Start one side's process and end it in any case. `setup`: see `bench.worker`."""
    environment = child_environment(
        HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS=str(threads)
    )
    with tempfile.TemporaryDirectory(prefix="metainfer-bench-") as directory:
        log = Path(directory) / "stderr"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "metainfer.bench.worker", json.dumps(setup)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends them all
            )
        try:
            yield SideProcess(title, process, log)
        finally:
            process.kill()
            process.communicate()
