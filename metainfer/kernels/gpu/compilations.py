"""Compilations: which kernels had to be compiled or loaded while somebody waited for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

_log = logging.getLogger(__name__)

Facts = Mapping[str, str]
"""What tells a kernel's code from other code of the same kernel: "is 64", by name."""

_MOST_SAID = 6
_ABSENT = "is not there"


class Compilations:
    """Counts what is compiled or loaded for the first time in this process. Warm-up is the time for
    it; while requests are served it holds them up, and is said in the log with the reason.

    Attributes:
        in_warm_up, in_service: how many.
    """

    def __init__(self) -> None:
        self.in_warm_up = 0
        self.in_service = 0
        self._serves = False
        self._known: dict[str, list[Facts]] = {}

    def begin_service(self) -> None:
        """From now on requests wait for what is compiled."""
        self._serves = True

    def note(self, kernel: str, facts: Facts) -> None:
        """A launch of `kernel` compiled or loaded it."""
        known = self._known.setdefault(kernel, [])
        if self._serves:
            self.in_service += 1
            why = news(facts, known)
            _log.warning("the kernel %s was compiled while requests were served: %s", kernel, why)
        else:
            self.in_warm_up += 1
        known.append(facts)


def news(facts: Facts, known: list[Facts]) -> str:
    """What is new in `facts`, beside the nearest of those that are known."""
    if not known:
        return "it had not been started before"
    nearest = min((_differences(facts, other) for other in known), key=len)
    said = [
        f"{name} {facts.get(name, _ABSENT)} (the nearest: {other})"
        for name, other in nearest.items()
    ]
    more = f" and {len(said) - _MOST_SAID} more" if len(said) > _MOST_SAID else ""
    return "; ".join(said[:_MOST_SAID]) + more if said else "its code was not in memory any more"


def _differences(facts: Facts, other: Facts) -> dict[str, str]:
    """What `other` says of all in which they differ."""
    names = dict.fromkeys((*facts, *other))
    return {name: other.get(name, _ABSENT) for name in names if facts.get(name) != other.get(name)}
