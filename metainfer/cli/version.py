"""`metainfer version`: the version, as data."""

from __future__ import annotations

import json
from dataclasses import dataclass

from metainfer import __version__
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag


@dataclass(frozen=True, slots=True)
class VersionOptions:
    """How it is printed."""

    json: bool = flag("--json", "Print it as JSON", False)


def run(terminal: Terminal, options: VersionOptions) -> int:
    version = json.dumps({"version": __version__}) if options.json else f"metainfer {__version__}"
    terminal.data(version)
    return 0


VERB = Verb("version", "Print the version", (("how it is printed", VersionOptions),), run)
