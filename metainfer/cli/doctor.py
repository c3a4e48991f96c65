"""`metainfer doctor`: what is wrong with a machine, for a model, and what to do about it."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer.cli.machine_flag import machine_flag
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_least

if TYPE_CHECKING:
    from metainfer.doctor.finding import Finding, Patient

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What is examined."""

    model: str | None = flag(
        "MODEL",
        "A checkpoint directory, a config.json or a known name, also of models that are not served"
        " yet; only the machine is examined if not given",
        aliases=("--model",),
    )
    machine: str | None = machine_flag()
    tensor_parallel_sizes: tuple[int, ...] = flag(
        "--tensor-parallel-size",
        "Ranks that share a layer, of the layouts whose kernels are looked at; those of 1, 2, 4, 8"
        " and 16 that there are cards for if not given",
        (),
        aliases=("--tp",),
        unit="n",
        many=True,
    )
    port: int | None = flag(
        "--port", "Look who listens on this TCP port of the machine at hand", unit="port"
    )
    compile: bool = flag(
        "--compile",
        "Prove by compiling that kernels fit the card: minutes the first time, then from the cache",
        False,
    )
    matrix: bool = flag(
        "--matrix",
        "Print what this engine does with the model, feature by feature, and which layouts of the"
        " cards it and others run, and stop",
        False,
    )
    log: str | None = flag(
        "--log",
        "Read a log of a server (vLLM, SGLang, metainfer) or of NCCL_DEBUG=INFO, gzipped or not, in"
        " place of a machine; - for stdin",
    )
    list: bool = flag("--list", "Print all checks and stop", False)
    json: bool = flag("--json", "Print the findings as JSON", False)

    def __post_init__(self) -> None:
        require_least("--tensor-parallel-size", self.tensor_parallel_sizes, 1)
        if self.port is not None and not 0 < self.port < 2**16:
            raise UserError(f"--port {self.port} is no TCP port")
        if self.port is not None and self.machine is not None:
            raise UserError(
                "--port looks at the machine at hand, --machine at another one",
                hint="leave one of them out",
            )
        sizes = self.tensor_parallel_sizes
        asked_too = self.model or self.machine or self.port or self.matrix or self.compile or sizes
        if self.log is not None and asked_too:
            raise UserError("--log is about a log alone", hint="leave out all but --json")
        if self.list and (asked_too or self.log is not None or self.json):
            raise UserError("--list is about the checks alone", hint="leave out all else")
        if self.log == "":
            raise UserError("--log names no file", hint="- reads stdin")
        if self.model is None and (self.matrix or self.compile or sizes):
            asked = "--compile" if self.compile else "--tensor-parallel-size"
            asked = "--matrix" if self.matrix else asked
            raise UserError(f"{asked} is about a model", hint="add its name")
        if self.matrix and (self.port or self.compile or sizes):
            raise UserError(
                "--matrix compiles nothing, lists all layouts and looks at no port",
                hint="leave out --compile, --tensor-parallel-size and --port",
            )


def run(terminal: Terminal, options: DoctorOptions) -> int:
    if options.log is not None:
        from metainfer.cli.doctor_log import read_log

        return read_log(terminal, options.log, as_json=options.json)
    from metainfer.doctor.examine import all_checks, examine
    from metainfer.doctor.finding import exit_code

    if options.list:
        from metainfer.cli.doctor_text import checks_text

        terminal.data(checks_text(all_checks()))
        return 0
    if options.matrix:
        return _matrix(terminal, options)
    patient = _patient(terminal, options)
    with terminal.progress("examined", "checks") as progress:
        findings = examine(patient, progress.update)
    if options.json:
        terminal.data(json.dumps(_record(options, patient, findings), indent=2))
    else:
        terminal.data(_text(options, patient, findings))
    return exit_code(findings)


def _matrix(terminal: Terminal, options: DoctorOptions) -> int:
    from metainfer.arch.shape_of import read_shape
    from metainfer.cli.doctor_text import layouts_text, matrix_text, record_of_matrix
    from metainfer.doctor.layout_matrix import idle_flags, layout_rows
    from metainfer.doctor.matrix import matrix
    from metainfer.hardware.known import machine_of
    from metainfer.hardware.machine import gpus_of

    assert options.model is not None
    shape, machine = read_shape(options.model), machine_of(options.machine)
    cells = (*matrix(shape, machine), *idle_flags(shape, machine))
    rows = layout_rows(shape, machine)
    if options.json:
        record = {
            "version": SCHEMA_VERSION,
            "kind": "support matrix",
            "machine": {"name": options.machine, "gpus": [gpu.name for gpu in gpus_of(machine)]},
            "model": shape.name,
            **record_of_matrix(cells, rows),
        }
        terminal.data(json.dumps(record, indent=2))
        return 0
    terminal.data(matrix_text(cells))
    if rows:
        terminal.data(f"\n{layouts_text(rows)}")
    return 0


def _patient(terminal: Terminal, options: DoctorOptions) -> Patient:
    """All facts, gathered before anything is examined."""
    from metainfer.arch.shape_of import read_shape
    from metainfer.cli.doctor_coverage import coverage_of, dividing
    from metainfer.doctor.estimate import tensor_sizes
    from metainfer.doctor.finding import Patient
    from metainfer.hardware.known import machine_of
    from metainfer.hardware.machine import gpus_of
    from metainfer.hardware.ports import read_port

    machine = machine_of(options.machine)
    port = None if options.port is None else read_port(Path("/"), options.port)
    if options.model is None:
        return Patient(machine, port=port)
    shape = read_shape(options.model)
    gpus, coverage = len(gpus_of(machine)), None
    # Other engines divide models, such as small ones, where this one does not.
    sizes = options.tensor_parallel_sizes or dividing(options.model, tensor_sizes(shape, gpus))
    if gpus and sizes:
        coverage = coverage_of(terminal, options.model, machine, sizes, options.compile)
    return Patient(machine, shape.arch, coverage=coverage, shape=shape, port=port)


def _record(
    options: DoctorOptions, patient: Patient, findings: tuple[Finding, ...]
) -> dict[str, object]:
    from metainfer.cli.doctor_text import record_of_finding
    from metainfer.doctor.finding import exit_code
    from metainfer.hardware.machine import gpus_of
    from metainfer.hardware.topology import fingerprint

    return {
        "version": SCHEMA_VERSION,
        "kind": "findings",
        "machine": {
            "name": options.machine,
            "gpus": [gpu.name for gpu in gpus_of(patient.machine)],
            "fingerprint": fingerprint(patient.machine),
        },
        "model": None if patient.shape is None else patient.shape.name,
        "exit_code": exit_code(findings),
        "findings": [record_of_finding(one) for one in findings],
    }


def _text(options: DoctorOptions, patient: Patient, findings: tuple[Finding, ...]) -> str:
    from metainfer.cli.doctor_text import findings_text
    from metainfer.hardware.facts import Unknown
    from metainfer.hardware.known import machine_names
    from metainfer.hardware.machine import gpus_of

    gpus = gpus_of(patient.machine)
    names = sorted({gpu.name for gpu in gpus})
    cards = f"{len(gpus)} x {', '.join(names)}" if gpus else "no GPU"
    named = f" ({options.machine})" if options.machine is not None else ""
    lines = [f"machine  {cards}{named}"]
    if patient.shape is not None:
        lines.append(f"model    {patient.shape.name}")
    if not findings:
        why = (
            patient.machine.gpus.why
            if isinstance(patient.machine.gpus, Unknown)
            else "there is no GPU"
        )
        told = (
            f"Nothing to examine: {why}. --machine takes a record of `metainfer probe --out` or the"
            f" name of a recorded machine: {', '.join(machine_names())}."
        )
        lines += ["", textwrap.fill(told, 100, break_on_hyphens=False)]
        return "\n".join(lines)
    lines += ["", findings_text(findings)]
    if not gpus:
        told = (
            "No card was looked at. --machine takes a record of `metainfer probe --out` or the name"
            f" of a recorded machine: {', '.join(machine_names())}."
        )
        lines += ["", textwrap.fill(told, 100, break_on_hyphens=False)]
    return "\n".join(lines)


VERB = Verb(
    "doctor",
    "Say what slows or breaks serving on this machine, and how to mend it",
    (("what is examined", DoctorOptions),),
    run,
    (
        "metainfer doctor deepseek-v4-flash",
        "metainfer doctor deepseek-v4.1-flash --machine rtx-6000d-x8",
        "metainfer doctor deepseek-v4-flash --matrix",
        "metainfer doctor --port 8000 --json",
        "metainfer doctor --log server.log",
    ),
)
