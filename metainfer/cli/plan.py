"""`metainfer plan`: which layout suits a machine, a model and a workload, and why."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag, flags_of
from metainfer.core.errors import UserError
from metainfer.plan.choices import NO_FLAGS, FormatFlags
from metainfer.plan.workload import Workload, parse_workload, workload_within
from metainfer.shipped import SHIPPED_MODEL, model_dir

if TYPE_CHECKING:
    from metainfer.arch.shapes import ModelShape
    from metainfer.hardware.machine import Machine
    from metainfer.plan.choices import Choices
    from metainfer.plan.proof import CacheProof

_OBJECTIVES = ("throughput", "ttft", "interactive")


def parse_pair(text: str) -> tuple[float, float]:
    """ "600,4000": one number for each machine."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 2 or not all(0 < number < math.inf for number in numbers):
        raise UserError(f"'{text}' is not two numbers above 0, such as 4800,11000")
    return numbers[0], numbers[1]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is planned."""

    model: str | None = flag(
        "MODEL",
        "A checkpoint directory, a config.json or a known name, also of models that are not served"
        " yet; the shipped model if not given",
        aliases=("--model",),
    )
    machine: str | None = flag(
        "--machine",
        "A record of a machine or the name of a recorded one; the machine at hand if not given",
        unit="file|name",
    )
    workload: Workload | None = flag(
        "--workload",
        "What comes, such as input=8192,output=512,concurrency=8 (which is the default; less where"
        " the model reads less), with rate=2.5 requests a second and context=32K tokens of the"
        " longest sequence if need be",
        unit="parts",
        parse=parse_workload,
    )
    objective: str = flag(
        "--objective",
        "What is best: most requests a second, the first token soonest, or each next token soonest",
        "throughput",
        choices=_OBJECTIVES,
    )
    engine: str = flag(
        "--engine",
        "Whose efficiency is assumed: metainfer, b12x, stock (vLLM and SGLang as they come), pcie"
        " (stock with exchanges made for PCIe), or fallback (kernels are missing)",
        "metainfer",
        choices=("metainfer", "b12x", "stock", "pcie", "fallback"),
    )
    compare: tuple[str, ...] = flag(
        "--compare",
        "Set two machines side by side, each a record or the name of a recorded one",
        (),
        unit="file|name",
        many=True,
    )
    power_w: tuple[float, float] | None = flag(
        "--power-w",
        "With --compare: watts of each machine under load, for tokens per joule",
        unit="A,B",
        parse=parse_pair,
    )
    price_per_hour: tuple[float, float] | None = flag(
        "--price-per-hour",
        "With --compare: price of an hour of each machine, for the cost of a million tokens",
        unit="A,B",
        parse=parse_pair,
    )
    from_command: str | None = flag(
        "--from",
        "Read a command that starts vLLM or SGLang, with its environment before it, or the file"
        " that holds it: what becomes of each flag, what it does here, what would do better",
        unit="command|file",
    )
    emit: str | None = flag(
        "--emit",
        "Print the launch command and environment of this engine that come nearest to the plan,"
        " and what they cannot express",
        choices=("metainfer", "vllm", "sglang"),
    )
    explain: bool = flag(
        "--explain", "Show where the time goes, the next layouts and why the others lose", False
    )
    json: bool = flag("--json", "Print the record of the plan as JSON", False)
    output: Path | None = flag(
        "--output", "Write the record of the plan to a file", aliases=("-o",), unit="file"
    )

    def __post_init__(self) -> None:
        modes = [
            name
            for name, given in (
                ("--compare", self.compare),
                ("--from", self.from_command),
                ("--emit", self.emit),
            )
            if given
        ]
        if len(modes) > 1:
            raise UserError(
                f"{modes[0]} and {modes[1]} do not go together", hint="ask for one, then the other"
            )
        if self.explain and modes:
            raise UserError(f"{modes[0]} has nothing to explain", hint="leave out --explain")
        if self.from_command and self.engine != "metainfer":
            raise UserError(
                "--engine is of a plan: what --from reads names its engine itself",
                hint="leave out --engine",
            )
        if self.compare and len(self.compare) != 2:
            raise UserError(
                f"--compare takes two machines, not {len(self.compare)}",
                hint="such as --compare rtx-6000d-x8 b300-x8; what else is given goes before it",
            )
        if self.compare and self.machine is not None:
            raise UserError(
                "--compare names its machines itself: leave out --machine",
                hint="such as --compare rtx-6000d-x8 b300-x8",
            )
        for name, value in (("--power-w", self.power_w), ("--price-per-hour", self.price_per_hour)):
            if value is not None and not self.compare:
                raise UserError(
                    f"{name} is of --compare, which is not given",
                    hint=f"such as --compare rtx-6000d-x8 b300-x8 {name} 4800,14000",
                )


def run(terminal: Terminal, options: PlanOptions, formats: FormatFlags) -> int:
    from metainfer.bench.record import check_place, write_json

    if options.output is not None:
        check_place(options.output, "--output")
    other = "--compare" if options.compare else "--from" if options.from_command else ""
    if other and formats != NO_FLAGS:
        given = next(
            b.flag.name for b in flags_of(FormatFlags) if getattr(formats, b.field_name) is not None
        )
        raise UserError(f"{given} is of a plan, not of {other}", hint="leave one of the two out")
    with terminal.waiting("comparing layouts"):
        if options.compare:
            written, told = _compare(options)
        elif options.from_command is not None:
            written, told = _advise(options)
        else:
            written, told = _plan(options, formats)
    if options.output is not None:
        write_json(options.output, written)
        terminal.say(f"wrote {options.output}")
    terminal.data(json.dumps(written, indent=2) if options.json else told)
    return 0


def _plan(options: PlanOptions, formats: FormatFlags) -> tuple[dict[str, Any], str]:
    """The record, and the text."""
    from metainfer.arch.shape_of import read_shape
    from metainfer.plan.emit import METAINFER, emit
    from metainfer.plan.gains import outlook
    from metainfer.plan.ledger_ranks import RankLedgers
    from metainfer.plan.search import search
    from metainfer.plan.search_record import record
    from metainfer.plan.search_text import explained, summary

    model = options.model or SHIPPED_MODEL
    shape, ledgers = read_shape(model), RankLedgers()
    machine, shown = _machine(options.machine)
    result = search(
        shape,
        machine,
        options.workload or workload_within(shape.side.max_model_len),
        ledgers,
        options.objective,
        options.engine,
        choices=_choices(options, formats, shape, machine),
    )
    if shown:
        result = replace(result, notes=(shown, *result.notes))
    if options.emit is not None:
        there = (model_dir(model) / "config.json").is_file()
        named = model if options.emit == METAINFER else str(model_dir(model))
        emitted = emit(result, options.emit, named if there else "MODEL")
        said = textwrap.wrap(shown, 100, initial_indent="# ", subsequent_indent="#   ")
        if not there:
            said.append(f"# MODEL: a directory or repository with the weights of {model}")
        told = "\n".join([*said, emitted.text()])
        return {**record(result), "emitted": asdict(emitted)}, told
    known = (model_dir(model) / "config.json").is_file()
    ahead = outlook(result, ledgers, formats, model if known else "DIRECTORY")
    told = explained(result, ahead) if options.explain else summary(result, ahead)
    return record(result, ahead), told


def _machine(text: str | None) -> tuple[Machine, str]:
    """The machine that is planned for, of the one at hand with what this process sees of it; and
    the sentence that says so."""
    from metainfer.hardware.known import machine_of
    from metainfer.hardware.visible import VARIABLE, shown_machine

    machine = machine_of(text)
    return shown_machine(machine, None if text else machine.environment.get(VARIABLE))


def _choices(
    options: PlanOptions, formats: FormatFlags, shape: ModelShape, machine: Machine
) -> Choices:
    """What may compete: by flags, by proofs that lie here, by the engine that is to run it."""
    from metainfer.plan.choices import SELF, Caches, choices_of
    from metainfer.plan.emit import METAINFER
    from metainfer.plan.formats import terms_on_paper
    from metainfer.plan.proof import cache_proofs
    from metainfer.plan.settings import EngineSettings

    proofs: tuple[CacheProof, ...] = ()
    if shape.arch is not None:
        terms = terms_on_paper(machine, shape.arch)
        proofs = cache_proofs(model_dir(options.model), shape.arch, EngineSettings(), terms)
    choices = choices_of(shape, options.engine, formats, proofs)
    free = formats.kv_cache_dtype is None and formats.index_cache_dtype is None
    if options.engine == SELF and options.emit not in (None, METAINFER) and free:
        choices = replace(choices, caches=(Caches(),))  # as that engine keeps them
    return choices


def _compare(options: PlanOptions) -> tuple[dict[str, Any], str]:
    from metainfer.arch.shape_of import read_shape
    from metainfer.hardware.known import machine_of
    from metainfer.plan.compare import compare, record, text
    from metainfer.plan.ledger_ranks import RankLedgers

    first, second = options.compare
    shape = read_shape(options.model or SHIPPED_MODEL)
    found = compare(
        shape,
        ((first, machine_of(first)), (second, machine_of(second))),
        options.workload or workload_within(shape.side.max_model_len),
        RankLedgers(),
        options.objective,
        options.engine,
        options.power_w,
        options.price_per_hour,
    )
    return record(found), text(found)


def _advise(options: PlanOptions) -> tuple[dict[str, Any], str]:
    from metainfer.arch.shape_of import read_shape
    from metainfer.hardware.known import machine_of
    from metainfer.plan.advice import advise, record, text
    from metainfer.plan.engine_commands import known_model, read_command
    from metainfer.plan.ledger_ranks import RankLedgers

    set_up = read_command(options.from_command or "")
    model = options.model or known_model(set_up.model)
    if not model:
        raise UserError("the command names no model", hint="give MODEL beside it")
    try:
        shape = read_shape(model)
    except UserError as error:
        raise UserError(
            error.message, hint="give MODEL beside --from: a directory or a known name"
        ) from error
    # A command that says what it sees is not bound by what this process sees.
    machine, shown = (
        _machine(options.machine) if set_up.visible is None else (machine_of(options.machine), "")
    )
    found = advise(
        set_up,
        shape,
        machine,
        options.workload or workload_within(shape.side.max_model_len),
        RankLedgers(),
        options.objective,
    )
    if shown:
        found = replace(found, notes=(shown, *found.notes))
    return record(found), text(found)


VERB = Verb(
    "plan",
    "Find the layout that suits a machine and a workload",
    (("plan", PlanOptions), ("formats, where they are fixed", FormatFlags)),
    run,
    examples=(
        "metainfer plan deepseek-v4-flash --machine rtx-pro-6000-x8",
        "metainfer plan glm-5.3 --machine rtx-6000d-x8 --objective ttft --explain",
        "metainfer plan deepseek-v4-flash --machine l40s-x8 --workload input=32K,output=1 --json",
        "metainfer plan glm-5.3 --compare rtx-6000d-x8 b300-x8 --power-w 4800,14000",
        "metainfer plan --machine rtx-pro-6000-x4 --from 'vllm serve DeepSeek-V4-Flash -tp 4'",
        "metainfer plan deepseek-v4-flash --machine rtx-pro-6000-x4 --emit sglang",
    ),
)
