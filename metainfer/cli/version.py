"""`metainfer version`: the version, as data."""

from __future__ import annotations

from metainfer import __version__
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb


def run(terminal: Terminal) -> int:
    terminal.data(f"metainfer {__version__}")
    return 0


VERB = Verb("version", "Print the version", (), run)
