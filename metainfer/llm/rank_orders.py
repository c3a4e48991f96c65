"""What rank 0 tells the processes of the other ranks, and what they answer: one answer an order.

A step travels as it is. Every rank computes and samples it by itself, from equal logits and equal
seeds, so that nothing else has to.
"""

from __future__ import annotations

import io
import pickle
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from metainfer.arch.record import Arch
from metainfer.comm.group import Group
from metainfer.core.errors import UserError
from metainfer.core.log import LogForm
from metainfer.kernels.tuned import Tuned
from metainfer.llm.step import Step, StepOutput
from metainfer.llm.step_wire import Packed
from metainfer.ops.base import Target
from metainfer.plan.plan import Plan
from metainfer.plan.settings import EngineSettings


class Abortable(Group, Protocol):
    """A group whose waits can be ended."""

    def abort(self, why: str) -> None:
        """End what all ranks wait for."""

    def part(self, ranks: Sequence[int]) -> Abortable: ...


class Meeting(Protocol):
    """Where ranks become a group; it can be sent to their processes."""

    def join(self, rank: int) -> Abortable:
        """Wait for the others. Raises GroupError."""


# ---- orders ----


@dataclass(frozen=True, slots=True)
class Start:
    """The first: load a rank's part of a model. While it does, `Progress` is told.

    Attributes:
        source: where weights are read, as `llm.engine.load_model` takes it.
        target, tuned: what layers bind by.
        cpus: that its threads are bound to; () for none.
        log: how this process logs; None where it does not.
    """

    rank: int
    plan: Plan
    arch: Arch
    source: Path
    settings: EngineSettings
    target: Target
    tuned: Tuned
    cpus: tuple[int, ...]
    log: LogForm | None


@dataclass(frozen=True, slots=True)
class Meet:
    """Become a group, in place of the one before."""

    meeting: Meeting


@dataclass(frozen=True, slots=True)
class Launch:
    """Read so many of the oldest steps whose results were not read, then launch one."""

    reads: int
    step: Packed | None = None


@dataclass(frozen=True, slots=True)
class DryRun:
    step: Step


@dataclass(frozen=True, slots=True)
class Capture:
    """Warm the sampler up, run decode steps of fixed shapes, and make their graphs."""


@dataclass(frozen=True, slots=True)
class Forget:
    """A step has failed on some rank: drop its results, if there are any."""

    step_id: int


@dataclass(frozen=True, slots=True)
class Alike:
    """Rank 0 has failed by itself after so many collectives. No order: nothing answers it. Ranks
    that failed at the same place are still in step."""

    calls: int


Order = Start | Meet | Launch | DryRun | Capture | Forget


# ---- answers ----


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of weights handed out so far, and in all. No answer to any order."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Done:
    """Attributes:
    digests: of the results that were read: (step, what `digest` makes of them).
    """

    digests: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """An order was not carried out.

    Attributes:
        error: what it was, in a sentence; `hint`: of a UserError.
        by_group: ranks could not go on together; another one may be the cause.
        lost: the rank's device cannot be trusted any more.
        apart: the rank is not in step with rank 0, and its group has been ended.
    """

    error: str
    hint: str | None
    by_user: bool
    by_group: bool
    lost: bool
    apart: bool


Answer = Progress | Done | Failed


class _Pickler(pickle.Pickler):
    """Knows read-only mappings, which pickle does not."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MappingProxyType):
            return _read_only, (dict(value),)
        return NotImplemented


def _read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


def encode(value: Order | Alike | Answer) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    return pickle.loads(data)


def digest(output: StepOutput) -> int:
    """Of the tokens that a step gave. Equal on all ranks, or they have drifted apart."""
    numbers = array("q")
    for one in output.sequences:
        numbers.append(-1 if one.error is None else -2)
        numbers.extend(one.token_ids)
    return zlib.crc32(numbers.tobytes())


def sentence(error: BaseException) -> str:
    """What an error says, on one line; errors that are not made on purpose with their name."""
    if isinstance(error, UserError):
        return error.message
    said = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    return said if kind in said or not kind.endswith("Error") else f"{kind}: {said}"


def names_of(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1, 3"."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
