"""What of a record may leave its owner's house: all but what tells who and where that is."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEFT_OUT = (
    "command lines; names of processes and of this host; paths but for their last parts; addresses;"
    " serials and UUIDs; variables of the environment that may hold one of these"
)
"""What `Discretion.record` leaves out, for people."""

_DROPPED = frozenset({"command", "uuid", "processes", "serial", "sha256"})
"""Fields. A hash of a part would not be that of what is left of it."""
_NOT_SHOWN = "(not shown)"
_PATH = re.compile(r"(?<![\w/.~])(?:~|\.\.?)?(?:/[^\s/'\"`:;,()<>|=]+)+/?")
_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])|(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")
_UUID = re.compile(r"(?:\w+-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_OPEN_NAME = re.compile(r"(?!.*(?:ADDR|COMM_ID|DIR|FILE|HOME|HOST|_IP|PATH|URL))", re.DOTALL)
_OPEN_VALUE = re.compile(r"[\w,:^+=-]{0,64}")


@dataclass(frozen=True, slots=True)
class Discretion:
    """Attributes:
    words: that are never shown -> what stands in their place.
    """

    words: Mapping[str, str]

    @classmethod
    def here(cls, places: Mapping[Path, str]) -> Discretion:
        """Of this host.

        Args:
            places: files and directories, whatever is in their names, and what stands in their
                place.
        """
        words = {
            str(form): name
            for path, name in places.items()
            for form in (path, path.resolve())
            if "/" in str(form)
        }
        host = socket.gethostname()
        return cls(words | {name: "(host)" for name in (host, host.partition(".")[0]) if name})

    def record(self, value: Any) -> Any:
        """The same JSON value with nothing in it that is not to be shown."""
        if isinstance(value, Mapping):
            return {
                self.text(key): self._variables(held) if key == "environment" else self.record(held)
                for key, held in value.items()
                if key not in _DROPPED
            }
        if isinstance(value, list | tuple):
            return [self.record(held) for held in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """The same of a sentence."""
        for word in sorted(self.words, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", self.words[word], text)
        text = _PATH.sub(lambda found: found.group().rstrip("/").rpartition("/")[2], text)
        return _UUID.sub(_NOT_SHOWN, _ADDRESS.sub(_NOT_SHOWN, text))

    def _variables(self, held: Any) -> Any:
        if not isinstance(held, Mapping):
            return self.record(held)
        return {
            name: self.text(value)
            if _OPEN_NAME.match(name) and _OPEN_VALUE.fullmatch(str(value))
            else _NOT_SHOWN
            for name, value in held.items()
        }
