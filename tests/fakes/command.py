"""The command line run inside the test's process, without a terminal."""

from __future__ import annotations

import io
from dataclasses import dataclass

from metainfer.cli.main import main
from metainfer.cli.terminal import Terminal


@dataclass(frozen=True)
class Ran:
    """What a command did: its exit code and its two streams."""

    code: int
    out: str
    err: str


def metainfer(*arguments: str, **environment: str) -> Ran:
    """`metainfer ARGUMENTS` with these environment variables only."""
    out, err = io.StringIO(), io.StringIO()
    code = main(arguments, Terminal(out, err, colour=False, live=False), environment)
    return Ran(code, out.getvalue(), err.getvalue())
