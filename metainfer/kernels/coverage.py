"""Coverage: which implementation every operation of a model gets on a card, and whether its code
fits that card, proved by compiling it. No GPU is needed.

Each use is run with its real shapes on the device "meta", where launches are only noted; what they
would compile is compiled for the target and its facts are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from torch.utils._python_dispatch import TorchDispatchMode

from metainfer.core.errors import UserError
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.compare import run
from metainfer.kernels.inputs.base import Draw
from metainfer.kernels.inputs.load import at_load
from metainfer.kernels.on_paper import Choice, choose
from metainfer.kernels.triton.compile_all import Outcome, compile_all
from metainfer.kernels.triton.launch import shared_limit
from metainfer.kernels.triton.machine_code import TENSOR_MEMORY_COLUMNS, MachineCode
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.kernels.tuned import UNTUNED, Tuned
from metainfer.ops.base import Load
from metainfer.ops.targets import CardKind
from metainfer.ops.use import DECODE, PREFILL, Use

_TOKENS = 131_072
PREFILL_ROWS = (1, 16, 128, 1024, 8192)
DECODE_ROWS = (1, 4, 16, 64, 256)
"""Rows of a call that are looked at: kernels choose their constants by them."""
_MOST_SEQUENCES = 256

Progress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of machine code that a use needs.

    Attributes:
        kernel: the function's name.
        constants: values that are compiled in, as they matter to a reader.
        code: its facts; None where it does not compile.
        problem: why it would not run; "" where it would.
    """

    kernel: str
    constants: str
    code: MachineCode | None
    problem: str


@dataclass(frozen=True, slots=True)
class Row:
    """One use in one phase.

    Attributes:
        backend: which would run most rows; "" where none would, or a reference.
        refused: better ones, and why each does not serve.
        launches: most launches of one call.
        pieces: code of all its calls, each once.
        torch_calls: operations of torch that its calls run beside launches.
        problem: why it is not covered; "" where it is.
        runs_on: all that would run it, and how many rows each.
        why: who chose.
    """

    use: Use
    phase: str
    backend: str
    refused: tuple[tuple[str, str], ...]
    launches: int
    pieces: tuple[Piece, ...]
    torch_calls: tuple[str, ...]
    problem: str
    runs_on: str = ""
    why: str = ""

    @property
    def problems(self) -> list[str]:
        """All that stands against the row, of its code too."""
        found = (self.problem, *(piece.problem for piece in self.pieces))
        return list(dict.fromkeys(filter(None, found)))

    @property
    def ok(self) -> bool:
        return not self.problems

    def most(self, fact: str) -> int:
        """The largest number of a fact of `MachineCode` among the pieces."""
        return max((getattr(p.code, fact) for p in self.pieces if p.code), default=0)

    @property
    def matrix(self) -> tuple[str, ...]:
        """All kinds of matrix instruction of the pieces."""
        kinds = {kind for piece in self.pieces if piece.code for kind in piece.code.matrix}
        return tuple(sorted(kinds))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A row before its code is compiled."""

    use: Use
    phase: str
    choice: Choice
    launches: int = 0
    units: tuple[Any, ...] = ()
    torch_calls: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """Uses to cover on one kind of card.

    Attributes:
        longest: tokens of the longest sequence of the model.
        tuned: what was measured on such a card.
    """

    uses: tuple[Use, ...]
    kind: CardKind
    longest: int = _TOKENS
    tuned: Tuned = UNTUNED


def cover(
    requests: Sequence[Request],
    workers: int,
    order: str = "",
    prefill_rows: Sequence[int] = PREFILL_ROWS,
    decode_rows: Sequence[int] = DECODE_ROWS,
    cache: Path | None = None,
    on_progress: Progress | None = None,
) -> list[tuple[Row, ...]]:
    """For each request a row for every use and phase.

    Args:
        workers: processes that compile.
        order: as `Registry.bind` takes it.
        prefill_rows, decode_rows: of the calls that are looked at, over a sequence of 131,072
            tokens or the longest; the most rows of prefill also over several of the longest.
        cache: as of `compile_all`.

    Raises:
        UserError: the order names what does not exist, or kernels are interpreted in this process.
    """
    if triton.knobs.runtime.interpret:
        raise UserError(
            "kernels are interpreted in this process and have no code for GPUs",
            hint="start it without TRITON_INTERPRET",
        )
    found = []
    for request in requests:
        tokens = min(request.longest, _TOKENS)
        loads = {
            PREFILL: [
                *(Load(min(rows, tokens), tokens) for rows in prefill_rows),
                _largest(prefill_rows, request.longest),
            ],
            DECODE: [Load(rows, tokens) for rows in decode_rows],
        }
        recorder = _Recorder(request, loads, order)
        found.append([recorder.record(use, phase) for use in request.uses for phase in use.phases])
    capabilities = [request.kind.capability for request in requests]
    jobs = [
        (unit, capability)
        for capability, rows in zip(capabilities, found, strict=True)
        for row in rows
        for unit in row.units
    ]
    outcomes = compile_all(jobs, workers, cache, on_progress)
    return [
        tuple(_row(row, capability, outcomes) for row in rows)
        for capability, rows in zip(capabilities, found, strict=True)
    ]


def _largest(prefill_rows: Sequence[int], longest: int) -> Load:
    """Rows of many sequences that are as long as can be: what is made for fewer entries, such as
    room for them decoded, is not made for these."""
    rows = min(max(prefill_rows), longest)
    return Load(rows, longest, min(rows, _MOST_SEQUENCES))


class _Recorder:
    """Chooses backends for one target and notes what they would launch."""

    def __init__(self, request: Request, loads: Mapping[str, Sequence[Load]], order: str) -> None:
        kind = request.kind
        self._launch = RecordingLauncher(kind.capability, kind.multiprocessors)
        self._registry = builtin_registry(self._launch).with_tuned(request.tuned)
        self._registry.check_order(order)
        self._target = kind.target
        self._loads = loads
        self._order = order

    def record(self, use: Use, phase: str) -> _Recorded:
        choice = choose(self._registry, use.op, use.case, self._target, self._order)
        if choice.is_slow:
            return _Recorded(use, phase, choice, problem="only the reference serves it")
        self._launch.launches.clear()
        calls: dict[str, None] = {}
        most = 0
        for load in self._loads[phase]:
            before = len(self._launch.launches)
            try:
                inputs = at_load(use.op, use.case, load, Draw(0, "meta"))
                with _TorchCalls(calls):
                    run(self._registry, use.op, choice.at(load.rows), use.case, inputs)
            except Exception as error:  # whatever a backend raises is what is to be reported
                said = f"{type(error).__name__}: {error}".split("\n")[0]
                problem = f"{load.rows} rows cannot be recorded: {said}"
                return _Recorded(use, phase, choice, problem=problem)
            most = max(most, len(self._launch.launches) - before)
        return _Recorded(use, phase, choice, most, self._launch.units(), tuple(calls))


class _TorchCalls(TorchDispatchMode):
    """Notes operations of torch that move data: not memory that is taken, not views."""

    def __init__(self, calls: dict[str, None]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        aliases = [result.alias_info for result in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and "empty" not in name:
            self._calls[name] = None
        return function(*arguments, **(named or {}))


def _row(row: _Recorded, capability: tuple[int, int], outcomes: Mapping[Any, Outcome]) -> Row:
    pieces = tuple(_piece(unit, capability, outcomes[unit, capability]) for unit in row.units)
    problem = row.problem
    if not problem and not row.launches and not row.torch_calls:
        problem = "it launches nothing"
    return Row(
        row.use,
        row.phase,
        row.choice.backend,
        row.choice.refused,
        row.launches,
        pieces,
        row.torch_calls,
        problem,
        row.choice.runs_on,
        row.choice.why,
    )


def _piece(unit: Any, capability: tuple[int, int], outcome: Outcome) -> Piece:
    constants = _told(unit)
    if not isinstance(outcome, MachineCode):
        return Piece(unit.name, constants, None, f"does not compile: {outcome}")
    problem = ""
    limit = shared_limit(capability)
    if outcome.shared_bytes > limit:
        problem = f"needs {outcome.shared_bytes} bytes of shared memory of {limit}"
    elif outcome.tensor_columns > TENSOR_MEMORY_COLUMNS:
        problem = f"needs {outcome.tensor_columns} columns of tensor memory"
    return Piece(unit.name, constants, outcome, problem)


def _told(unit: Any) -> str:
    """Constants that were given by name, and options."""
    named = dict(unit.named_constants()) if hasattr(unit, "named_constants") else unit.constants
    pairs = {**dict(named), **dict(unit.options)}
    return " ".join(f"{name}={value}" for name, value in pairs.items() if value is not None)
