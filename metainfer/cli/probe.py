"""`metainfer probe`: what this machine is, as a record that every other verb can take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer.cli.machine_flag import machine_flag
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.core.errors import UserError

if TYPE_CHECKING:
    from metainfer.hardware.machine import Machine


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What is looked at, and where the record goes."""

    out: Path | None = flag("--out", "Write the record to this file", aliases=("-o",))
    measure: bool = flag(
        "--measure",
        "Measure how its GPUs talk and compute, in two minutes at most, or take what was measured"
        " before",
        False,
    )
    fresh: bool = flag("--fresh", "With --measure: measure again", False)
    machine: str | None = machine_flag()
    json: bool = flag("--json", "Print the record as JSON", False)


def run(terminal: Terminal, options: ProbeOptions) -> int:
    from metainfer.bench.record import check_place, write_whole
    from metainfer.cli.env import machine_rows, wrapped
    from metainfer.cli.machine_text import machine_lines
    from metainfer.hardware.facts import Unknown
    from metainfer.hardware.known import machine_of
    from metainfer.hardware.topology import fingerprint

    if options.out is not None:
        check_place(options.out, "--out")
    machine = machine_of(options.machine)
    if options.measure:
        machine = _measured(terminal, options, machine)
    elif options.fresh:
        raise UserError("--fresh measures nothing by itself", hint="add --measure")
    if options.out is not None:
        write_whole(options.out, (machine.to_json() + "\n").encode())
        terminal.say(f"wrote {options.out}")
    if options.json:
        terminal.data(machine.to_json())
        return 0
    rows = [row for row in machine_rows(machine) if not row[0].startswith(("gpu", "driver"))]
    terminal.data("\n".join(wrapped(label, text) for label, text in rows))
    terminal.data("\n" + "\n".join(machine_lines(machine)))
    if not isinstance(machine.gpus, Unknown) and machine.gpus:
        terminal.data(f"\nfingerprint  {fingerprint(machine)}")
    return 0


def _measured(terminal: Terminal, options: ProbeOptions, machine: Machine) -> Machine:
    """With what is kept of it or is measured now. Raises UserError where it is a recorded one."""
    from metainfer.hardware.facts import Unknown
    from metainfer.hardware.measured import read_measured

    if options.machine is not None:
        raise UserError(
            "--measure needs the machine itself, not a record of one", hint="leave --machine out"
        )
    if isinstance(machine.gpus, Unknown) or not machine.gpus:
        why = f" ({machine.gpus.why})" if isinstance(machine.gpus, Unknown) else ""
        terminal.say(f"nothing is measured: no GPU is known here{why}")
        return machine
    kept = read_measured(machine)
    if not isinstance(kept, str) and not options.fresh:
        terminal.say(f"measured on {kept.date}; --fresh measures again")
        return machine
    from metainfer.comm.measure import measure

    plain = replace(machine, curves=(), rates=(), unmeasured=(), sources=())
    with terminal.progress("measuring:", "done") as progress:
        return measure(plain, progress.say, progress.update)


VERB = Verb(
    "probe",
    "Look at this machine: GPUs, links, pairs, host",
    (("the machine", ProbeOptions),),
    run,
    (
        "metainfer probe",
        "metainfer probe --measure --out machine.json",
        "metainfer probe --machine rtx-pro-6000-x8",
    ),
)
