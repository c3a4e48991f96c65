"""Log lines: one logger tree, `metainfer.*`, written to stderr by whoever starts the process.

Modules take `logging.getLogger(__name__)`; only an entry point calls `configure`. A library user
who does not call it gets Python's own behaviour.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from metainfer.core.errors import UserError

LEVELS = ("debug", "info", "warning", "error")


class _TextFormatter(logging.Formatter):
    """`07:48:05 warning llm.loop: message`"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("metainfer.")
        text = f"{clock} {record.levelname.lower()} {name}: {record.getMessage()}"
        return (
            text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"
        )


class _JsonFormatter(logging.Formatter):
    """One JSON object per line: time (Unix seconds), level, logger, message, and any exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class LogForm:
    """How a process logs: arguments of `configure`."""

    level: str
    as_json: bool


def form_in_force() -> LogForm | None:
    """How this process logs, for its children; None where nobody configured it."""
    root = logging.getLogger("metainfer")
    if not root.handlers:
        return None
    as_json = isinstance(root.handlers[0].formatter, _JsonFormatter)
    return LogForm(logging.getLevelName(root.level).lower(), as_json)


def configure(level: str = "info", *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send `metainfer.*` records of `level` and above to `stream` (stderr); replaces an earlier
    configuration. Raises UserError naming an unknown level."""
    if level not in LEVELS:
        raise UserError(f"log level '{level}' is not one of {', '.join(LEVELS)}")
    root = logging.getLogger("metainfer")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
