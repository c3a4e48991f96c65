"""`metainfer probe`: what this machine is, as a record that every other verb can take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metainfer.cli.machine_flag import machine_flag
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What is looked at, and where the record goes."""

    out: Path | None = flag("--out", "Write the record to this file", aliases=("-o",))
    machine: str | None = machine_flag()
    json: bool = flag("--json", "Print the record as JSON", False)


def run(terminal: Terminal, options: ProbeOptions) -> int:
    from metainfer.bench.record import write_whole
    from metainfer.cli.env import machine_rows
    from metainfer.cli.machine_text import machine_lines
    from metainfer.hardware.facts import Unknown
    from metainfer.hardware.known import machine_of
    from metainfer.hardware.topology import fingerprint

    machine = machine_of(options.machine)
    if options.out is not None:
        write_whole(options.out, (machine.to_json() + "\n").encode())
        terminal.say(f"wrote {options.out}")
    if options.json:
        terminal.data(machine.to_json())
        return 0
    rows = [row for row in machine_rows(machine) if not row[0].startswith(("gpu", "driver"))]
    terminal.data("\n".join(f"{label:<10}{text}" for label, text in rows))
    terminal.data("\n" + "\n".join(machine_lines(machine)))
    if not isinstance(machine.gpus, Unknown) and machine.gpus:
        terminal.data(f"\nfingerprint  {fingerprint(machine)}")
    return 0


VERB = Verb(
    "probe",
    "Look at this machine: GPUs, links, pairs, host",
    (("the machine", ProbeOptions),),
    run,
    (
        "metainfer probe",
        "metainfer probe --out machine.json",
        "metainfer probe --machine rtx-pro-6000-x8",
    ),
)
