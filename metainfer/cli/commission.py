"""`metainfer commission`: all that an owner's machine can say of a model, in one file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag, parse_positive
from metainfer.core.errors import UserError
from metainfer.core.units import format_seconds
from metainfer.hardware.device_names import parse_device
from metainfer.plan.workload import Workload, parse_workload
from metainfer.shipped import SHIPPED_MODEL

if TYPE_CHECKING:
    from metainfer.bench.commission import Ledger, Outcome, State
    from metainfer.cli.commission_steps import Asked, Step

_BUDGET_S = 1200.0
_LEAST_SHARE_S = 10.0
"""Of a step, whatever those before it took."""


@dataclass(frozen=True, slots=True)
class CommissionOptions:
    """What is commissioned, and where its files go."""

    model: str | None = flag(
        "MODEL",
        "A checkpoint directory or a known name; the shipped model if not given",
        aliases=("--model",),
    )
    directory: Path | None = flag(
        "--dir",
        "Where all files go, and where a run goes on that was interrupted; commission-MODEL if not"
        " given",
        unit="directory",
    )
    workload: Workload | None = flag(
        "--workload",
        "What is planned for, as `metainfer plan --workload` takes it",
        unit="parts",
        parse=parse_workload,
    )
    objective: str = flag(
        "--objective",
        "What the plan is to be best at, as of `metainfer plan`",
        "throughput",
        choices=("throughput", "ttft", "interactive"),
    )
    device: str | None = flag(
        "--device",
        "Where operations and stages run: cpu, cuda, or one GPU such as cuda:1; the GPU if there is"
        " one",
        unit="device",
        parse=parse_device,
    )
    budget_s: float = flag(
        "--budget",
        "Time of all steps together; each has a share, after which it begins nothing more",
        _BUDGET_S,
        unit="seconds",
        parse=parse_positive,
    )
    again: tuple[str, ...] = flag(
        "--again", "Steps to do again, though they ended", (), unit="step", many=True
    )
    show: Path | None = flag(
        "--show", "Print this record, if nobody changed it, and do nothing", unit="file"
    )
    json: bool = flag("--json", "Print the record to stdout instead of the table", False)


def run(terminal: Terminal, options: CommissionOptions) -> int:
    from metainfer.bench.commission import exit_code, read_record
    from metainfer.bench.commission_report import report
    from metainfer.cli.commission_steps import STEPS

    if options.show is not None:
        record = read_record(options.show)
    else:
        record = commission(terminal, options, STEPS)
    terminal.data(json.dumps(record, indent=2) if options.json else report(record))
    return exit_code(record)


def commission(
    terminal: Terminal, options: CommissionOptions, steps: Sequence[Step]
) -> dict[str, Any]:
    """Do all steps that have not ended yet, and return the record, which was written.

    Raises UserError: there is no such model or step, or nothing can be written. Raises what
    interrupts it, once the record says so.
    """
    from metainfer.bench.commission import State
    from metainfer.bench.record import prose

    _check_names(options.again, steps)
    asked, ledger = _begun(terminal, options)
    names = [step.name for step in steps]
    terminal.say(
        f"{len(steps)} steps, about {format_seconds(options.budget_s)} in all; Ctrl-C ends it, and"
        " the same command goes on"
    )
    began_s = time.monotonic()
    record = ledger.record(names)
    before = {step.name: _before(step, options, asked, ledger) for step in steps}
    for number, step in enumerate(steps, 1):
        terminal.heading(f"\n{number} of {len(steps)}  {step.name}: {step.title}")
        ended = before[step.name]
        if ended is not None:
            terminal.say(f"{ended.state} before, on {ended.date}{_again(ended)}")
            continue
        left_s = options.budget_s - (time.monotonic() - began_s)
        to_do = [one.weight for one in steps[number - 1 :] if before[one.name] is None]
        begun = _Begun(step, asked)
        try:
            outcome = begun.done(terminal, max(left_s * step.weight / sum(to_do), _LEAST_SHARE_S))
        except (KeyboardInterrupt, SystemExit):
            if ledger.ended(step.name) is None:
                ledger.keep(begun.outcome(State.INTERRUPTED, ""), names)
            terminal.say(
                f"interrupted; what was found before is in {ledger.path}, and the same command goes"
                " on"
            )
            raise
        record = ledger.keep(outcome, names)
        terminal.say(_sentence(outcome))
    terminal.say(f"\nrecord: {ledger.path}, to keep and to send back")
    terminal.say(prose(f"left out of it: {record['left_out']}") + "\n")
    return record


def _before(step: Step, options: CommissionOptions, asked: Asked, ledger: Ledger) -> Outcome | None:
    """How a step has ended that is not to be done again. Others read its file."""
    found = None if step.name in options.again else ledger.ended(step.name)
    if found is None or found.record is None or (asked.directory / step.file).exists():
        return found
    return None


def _begun(terminal: Terminal, options: CommissionOptions) -> tuple[Asked, Ledger]:
    from metainfer.bench.commission import Ledger, model_key
    from metainfer.bench.record import check_place
    from metainfer.bench.sendable import Discretion
    from metainfer.cli.commission_steps import Asked
    from metainfer.hardware.known import machine_of
    from metainfer.shipped import model_dir

    model = options.model or SHIPPED_MODEL
    _check_model(model)
    name, path = model_dir(model).resolve().name, model_dir(model)
    directory = options.directory or Path(f"commission-{name}")
    check_place(directory / "commission.json", "--dir")
    machine = machine_of(None)
    told = {
        "model": name,
        "workload": None if options.workload is None else asdict(options.workload),
        "objective": options.objective,
        "device": options.device,
        "budget_s": options.budget_s,
    }
    discretion = Discretion.here({path: name, directory: "DIR", Path.cwd(): ".", Path.home(): "~"})
    ledger = Ledger(directory, told, model_key(path, name), machine, discretion)
    if ledger.moved:
        terminal.say(ledger.moved)
    asked = Asked(model, options.workload, options.objective, options.device, directory, machine)
    return asked, ledger


def _check_model(model: str) -> None:
    """Raises UserError before anything is done where there is no such model."""
    from metainfer.arch.families import read_attention
    from metainfer.shipped import model_dir

    directory = model_dir(model)
    read_attention(directory if directory.is_dir() else model)


def _check_names(names: Sequence[str], steps: Sequence[Step]) -> None:
    """Raises UserError naming what is no step."""
    known = [step.name for step in steps]
    for name in names:
        if name not in known:
            raise UserError(
                f"--again: there is no step '{name}'", hint=f"steps: {', '.join(known)}"
            )


class _Begun:
    """A step that is being done. What stands in its file from before is of another run, and goes.

    Raises OSError: the file cannot be removed.
    """

    def __init__(self, step: Step, asked: Asked) -> None:
        self._step, self._asked = step, asked
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._began_s = time.monotonic()
        self._file = asked.directory / step.file
        self._file.unlink(missing_ok=True)

    def done(self, terminal: Terminal, share_s: float) -> Outcome:
        """Raises what interrupts it."""
        from metainfer.bench.commission import State
        from metainfer.cli.commission_steps import LeftOut
        from metainfer.cli.step_process import done_apart

        try:
            job = self._step.job(self._asked, share_s)
        except UserError as error:
            return self.outcome(State.REFUSED, error.message)
        if isinstance(job, LeftOut):
            return self.outcome(State.LEFT_OUT, job.why)
        ended = done_apart(job, terminal)
        state = _states().get(ended.code, State.CRASHED)
        record = _read(self._file)
        why = ended.why
        if state is State.DONE and record is not None and (left := self._step.unreached(record)):
            state, why = State.PARTIAL, left
        why = why or {
            State.DONE: self._step.note(self._asked),
            State.FAILED: f"{self._step.file} says what",
            State.PARTIAL: f"its {format_seconds(share_s)} were up before all was done",
        }.get(state, "")
        return self.outcome(state, why)

    def outcome(self, state: State, why: str) -> Outcome:
        """With what the step has written."""
        from metainfer.bench.commission import Outcome

        took_s = round(time.monotonic() - self._began_s, 3)
        return Outcome(self._step.name, state, why, self._date, took_s, _read(self._file))


def _read(file: Path) -> Any:
    """None for no file, or none that is whole."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _states() -> Mapping[int, State]:
    """By exit codes of verbs."""
    from metainfer.bench.commission import State
    from metainfer.cli.step_process import EXIT_LATE

    return MappingProxyType(
        {
            0: State.DONE,
            1: State.FAILED,
            UserError.exit_code: State.REFUSED,
            3: State.PARTIAL,
            EXIT_LATE: State.LATE,
        }
    )


def _sentence(outcome: Outcome) -> str:
    """How it ended and why; of a traceback the end, for the record has all of it."""
    from metainfer.bench.commission import State

    if outcome.state is State.CRASHED:
        return (
            f"crashed: {outcome.why.splitlines()[-1]}; this is a bug in metainfer: send the record"
            " back"
        )
    return f"{outcome.state}{f': {outcome.why}' if outcome.why else ''}{_again(outcome)}"


def _again(outcome: Outcome) -> str:
    """How to get more of what is not done again by itself."""
    from metainfer.bench.commission import State

    partial = outcome.state is State.PARTIAL
    return f" (--again {outcome.name} gives it the whole --budget)" if partial else ""


VERB = Verb(
    "commission",
    "Probe, plan, verify, tune and measure in one run, into one file",
    (("what is commissioned", CommissionOptions),),
    run,
    (
        "metainfer commission",
        "metainfer commission /data/DeepSeek-V4-Flash --dir box-1",
        "metainfer commission deepseek-v4-flash --again verify",
        "metainfer commission --show box-1/commission.json",
    ),
)
