"""The record of a commissioning: steps that end one by one, kept so that a rerun goes on.

One signed file holds all of it, is written anew behind every step, and says nothing of who made it.
A step that has ended counts for as long as machine, versions and what was asked are the same; else
the file makes way for a new one, under another name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from metainfer.bench.record import provenance, write_json
from metainfer.bench.sendable import LEFT_OUT, Discretion
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Machine
from metainfer.hardware.topology import fingerprint
from metainfer.kernels.verify_record import read_signed, sign

KIND = "metainfer commission"
RECORD_VERSION = 1
FILE = "commission.json"


class State(StrEnum):
    """How a step ended."""

    DONE = "done"
    PARTIAL = "partial"  # its time was up
    FAILED = "failed"  # what it checks or measures did not come out right
    LEFT_OUT = "left out"  # there is nothing here to do it on
    REFUSED = "refused"  # it did not begin
    CRASHED = "crashed"
    LATE = "late"  # it did not end, and was ended
    INTERRUPTED = "interrupted"


ENDED = frozenset({State.DONE, State.PARTIAL, State.FAILED})
"""Not done again."""

BAD = frozenset({State.FAILED, State.REFUSED, State.CRASHED, State.LATE})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step.

    Attributes:
        name: of the step.
        state: how it ended.
        why: a sentence, "" where nothing is to be said.
        date: when it began, UTC.
        seconds: that it took.
        record: what it wrote; None for nothing.
    """

    name: str
    state: State
    why: str
    date: str
    seconds: float
    record: Any

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Outcome:
        return cls(**{**told, "state": State(told["state"])})


class Ledger:
    """The outcomes of a directory.

    Args:
        directory: made if it is not there.
        asked: what was asked for, JSON-ready, as it may be shown.
        model_key: tells models apart that have one name.
        discretion: of what steps write.

    Attributes:
        path: of the file.
        moved: where an earlier file of another commissioning went, and what of it is another; ""
            for nothing.

    Raises:
        UserError: the file there is not one of ours, or was changed.
        OSError: it cannot be moved.
    """

    def __init__(
        self,
        directory: Path,
        asked: Mapping[str, Any],
        model_key: str,
        machine: Machine,
        discretion: Discretion,
    ) -> None:
        self.path = directory / FILE
        self.moved = ""
        self._discretion = discretion
        origin = discretion.record(provenance())
        self._head = {
            "kind": KIND,
            "version": RECORD_VERSION,
            "left_out": LEFT_OUT,
            **origin,
            "asked": json.loads(json.dumps(asked)),
            "model_key": model_key,
            "fingerprint": fingerprint(machine),
        }
        self._outcomes: dict[str, Outcome] = {}
        if self.path.is_file():
            try:
                self._go_on(read_record(self.path))
            except UserError as error:
                hint = "move it away, or name another directory with --dir"
                raise UserError(error.message, hint) from error

    def _go_on(self, before: Mapping[str, Any]) -> None:
        if what := _other(before, self._head):
            place = self.path.with_name(f"commission-{before['sha256'][:8]}.json")
            self.path.replace(place)
            self.moved = f"{self.path} is of another {what}: it is kept as {place.name}"
            return
        self._outcomes = {told["name"]: Outcome.read(told) for told in before["steps"]}

    def ended(self, name: str) -> Outcome | None:
        """What is not to be done again."""
        found = self._outcomes.get(name)
        return found if found is not None and found.state in ENDED else None

    def keep(self, outcome: Outcome, order: Iterable[str]) -> dict[str, Any]:
        """Write the record with this outcome in it, of the steps of `order`. Raises OSError."""
        shown = Outcome(
            outcome.name,
            outcome.state,
            self._discretion.text(outcome.why),
            outcome.date,
            outcome.seconds,
            self._discretion.record(outcome.record),
        )
        self._outcomes[outcome.name] = shown
        made = self.record(order)
        write_json(self.path, made)
        return made

    def record(self, order: Iterable[str]) -> dict[str, Any]:
        """Signed; of these steps, in their order, those of which something is known."""
        known = [self._outcomes[name] for name in order if name in self._outcomes]
        return sign({**self._head, "steps": [asdict(one) for one in known]})


def _other(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What of an earlier record is another than now; "" for nothing. A step that had more time, or
    less, is none the less done."""
    if before.get("model_key") != now["model_key"]:
        return "model"
    for name, value in now["asked"].items():
        if name != "budget_s" and before["asked"].get(name) != value:
            return name
    if before.get("fingerprint") != now["fingerprint"]:
        return "machine"
    same = all(before.get(name) == now[name] for name in ("versions", "commit"))
    return "" if same else "version"


def model_key(directory: Path, name: str) -> str:
    """Of the config in a model's directory, where there is one, and of its name."""
    config = directory / "config.json"
    held = config.read_bytes() if config.is_file() else b""
    return hashlib.sha256(name.encode() + b"\0" + held).hexdigest()[:16]


def read_record(path: Path) -> dict[str, Any]:
    """Raises UserError naming the file: it is not one of ours, was changed, or lacks something."""
    try:
        record = read_signed(path.read_bytes(), KIND, RECORD_VERSION)
    except UserError as error:
        raise UserError(f"{path}: {error.message}", error.hint) from error
    try:
        steps = [Outcome.read(told) for told in record["steps"]]
        str.join("", (record["date"], record["commit"], record["asked"]["model"]))
        str.join("", (text for one in steps for text in (one.name, one.why, one.date)))
        sum(one.seconds for one in steps)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: the record is not as {KIND} writes it ({error})") from error
    return record


def exit_code(record: Mapping[str, Any]) -> int:
    """1 where a step failed, did not begin, crashed or did not end, 3 where the time of one was up
    or it was interrupted, else 0."""
    states = {State(step["state"]) for step in record["steps"]}
    if states & BAD:
        return 1
    return 3 if states & {State.PARTIAL, State.INTERRUPTED} else 0
