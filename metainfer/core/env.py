"""The one file that reads the process environment, and the table of every variable.

Flags win over variables. Variables of other programs (NCCL_*, OMP_*) steer nothing here; they are
recorded, since they steer libraries, and `bound_spinning` looks at two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, what it does, and what holds without it."""

    name: str
    help: str
    default: str


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "METAINFER_API_KEY",
        "The key that `serve` demands and that `bench serve` sends, where --api-key is not given.",
        "no key",
    ),
    Variable(
        "METAINFER_COMMIT",
        "The commit that records name where the sources lie outside of a git checkout, as in an"
        " image.",
        "unknown",
    ),
    Variable(
        "METAINFER_LOG_LEVEL",
        "How much is logged to stderr: debug, info, warning or error.",
        "info",
    ),
    Variable(
        "NO_COLOR",
        "Set to anything: no colour on the terminal (see no-color.org).",
        "colour on a terminal",
    ),
)

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")

SECRETS = frozenset({"METAINFER_API_KEY"})
"""Variables whose values are never printed."""


def read_environment() -> Mapping[str, str]:
    """The variables of the table that are set and not empty."""
    names = (variable.name for variable in VARIABLES)
    return {name: value for name in names if (value := os.environ.get(name))}


def inherited(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Variables of other programs whose names begin so, sorted; values of keys are left out."""
    return {
        name: "(not shown)" if _SECRET.search(name) else os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(prefixes)
    }


def bound_spinning() -> None:
    """Let idle OpenMP threads give up their core soon, unless the user said how long they spin.

    With as many threads as cores, GNU's OpenMP spins for milliseconds at the end of every parallel
    region; beside other work that can cost far more than the region: where two threads of a prefill
    had to share one core, 20,000 turns took 1.8 to 2.5 s in place of 0.1, and 4,000 took 0.7. It is
    read when torch is imported, by this process and its children.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "4000"


def child_environment(**changes: str) -> dict[str, str]:
    """The whole environment with `changes` on top, to hand to a child process as it is."""
    return {**os.environ, **changes}
