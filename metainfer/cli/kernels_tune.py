"""`metainfer kernels tune`: which implementation of each operation is fastest on this card."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.cli.verify import layout_of, memory_for, usual_workers
from metainfer.core.config import flag, parse_positive
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_least
from metainfer.core.units import format_count
from metainfer.hardware.device_names import gpu_number, parse_device
from metainfer.ops.use import PARTS
from metainfer.shipped import SHIPPED_MODEL

if TYPE_CHECKING:
    from metainfer.hardware.machine import Machine
    from metainfer.kernels.platform import Platform
    from metainfer.kernels.tune import Work
    from metainfer.kernels.tune_record import Conditions
    from metainfer.kernels.tune_run import Finding
    from metainfer.ops.use import Use
    from metainfer.plan.plan import Plan

_NOT_ALL_RUN = 3  # exit code


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What is tuned, at which sizes, and where the record goes."""

    model: str | None = flag(
        "MODEL",
        "A known name or a checkpoint directory; the shipped model if not given",
        aliases=("--model",),
    )
    plan: Path | None = flag(
        "--plan",
        "A plan whose layout, formats and kernel order hold, as JSON; it does not name its MODEL."
        " Without it, what serve would choose without flags",
    )
    tensor_parallel_size: int | None = flag(
        "--tensor-parallel-size",
        "Ranks that share a layer; one of them is tuned",
        aliases=("--tp",),
        unit="n",
    )
    part: str | None = flag("--part", "Only the operations of this part", choices=PARTS)
    device: str | None = flag(
        "--device",
        "Where: cpu, cuda, or one GPU such as cuda:1; the GPU if there is one",
        unit="device",
        parse=parse_device,
    )
    entries: tuple[int, ...] = flag(
        "--entries",
        "Entries of context (tokens where a layer does not compress), over which times are added;"
        " 2K 32K on a GPU, 2K on a CPU",
        (),
        unit="n",
        many=True,
    )
    prefill_rows: tuple[int, ...] = flag(
        "--prefill-rows",
        "Rows of steps of prefill; 512 and the plan's chunk on a GPU, 256 on a CPU",
        (),
        unit="rows",
        many=True,
    )
    decode_batches: tuple[int, ...] = flag(
        "--decode-batches",
        "Rows of steps of decode; 1 8 16 64 on a GPU, 1 8 16 on a CPU",
        (),
        unit="rows",
        many=True,
    )
    budget_s: float | None = flag(
        "--budget",
        "Begin nothing after this time; what was never tuned comes first, and where some is left"
        " the exit code is 3",
        unit="seconds",
        parse=parse_positive,
    )
    seed: int | None = flag("--seed", "Fixes the inputs; drawn if not given")
    out: Path | None = flag("--out", "Write what was found to this file too", unit="file")
    json: bool = flag("--json", "Print what was found as JSON instead of the table", False)

    def __post_init__(self) -> None:
        if self.plan is not None and self.model is None:
            raise UserError(
                "--plan: a plan does not name its model",
                hint=f"metainfer kernels tune MODEL --plan {self.plan}",
            )
        require_least("--tensor-parallel-size", self.tensor_parallel_size, 1)
        require_least("--entries", self.entries, 1)
        require_least("--prefill-rows", self.prefill_rows, 1)
        require_least("--decode-batches", self.decode_batches, 1)
        if self.out is not None and self.out.is_dir():
            raise UserError(f"--out: {self.out} is a directory", hint="name a file")


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a plan, or what serve would choose, says of the operations.

    Attributes:
        chunk: rows of the largest step of prefill.
    """

    uses: tuple[Use, ...]
    order: str
    chunk: int
    conditions: Conditions


def run(terminal: Terminal, options: TuneOptions) -> int:
    from metainfer.bench.record import check_place, provenance, write_json
    from metainfer.comm.group import Solo
    from metainfer.hardware.probe import probe
    from metainfer.kernels import tune_record
    from metainfer.kernels.platform import platform
    from metainfer.kernels.tune_run import Place, Workers, tune
    from metainfer.kernels.tuned import key_of

    plan = _plan_of(options)
    if options.out is not None:
        check_place(options.out, "--out")
    on = platform(options.device)
    machine = probe()
    subject = _subject(options, plan, on, machine)
    works = _works(options, subject, on)
    facts = tune_record.tune_facts(machine, on.device, gpu_number(options.device or ""))
    known = tune_record.find(facts)
    for sentence in known.broken:
        terminal.hint(sentence)
    tuned = known.tuned(on.target, subject.conditions)
    works.sort(key=lambda work: key_of(work.op, work.case) in tuned.measured)
    place = Place(
        options.device,
        secrets.randbelow(2**31) if options.seed is None else options.seed,
        subject.conditions.caches,
        subject.conditions.threads,
    )
    memory_bytes = memory_for(machine, on.device, None)
    workers = Workers()
    if on.device == "cuda":
        workers = Workers(usual_workers(machine, memory_bytes), memory_bytes)
    origin = provenance()
    found: list[Finding] = []
    unkept: dict[str, None] = {}

    def kept(findings: Sequence[Finding]) -> None:
        found.extend(findings)
        try:
            tune_record.keep(facts, subject.conditions, findings, origin)
        except OSError as error:
            unkept[str(error)] = None

    terminal.say(f"{format_count(len(works))} operations on {on.name} as {on.target}")
    with terminal.progress("tuned", "steps") as progress:
        try:
            left = tune(place, works, Solo(), kept, progress.update, options.budget_s, workers)
        except KeyboardInterrupt:
            where = "is kept" if not unkept else f"is lost: {next(iter(unkept))}"
            terminal.say(f"interrupted; what was found of {len(found)} operations {where}")
            raise
    for why in unkept:
        terminal.hint(f"times are not kept where serve looks for them: {why}")
    entries = [tune_record.entry(finding, subject.conditions) for finding in found]
    record = tune_record.make_record(facts, entries, origin)
    if options.out is not None:
        write_json(options.out, record)
        terminal.say(f"record: {options.out}")
    terminal.data(json.dumps(record, indent=2) if options.json else _report(on, subject, found))
    if left:
        terminal.say(f"{left} of {len(works)} operations were not reached; run it again")
    return _NOT_ALL_RUN if left else 0


def _works(options: TuneOptions, subject: _Subject, on: Platform) -> list[Work]:
    from metainfer.arch.families import read_attention
    from metainfer.kernels.tune import TuneSizes, works_of

    usual = TuneSizes.of(on.device, subject.chunk)
    sizes = TuneSizes(
        options.prefill_rows or usual.prefill_rows,
        options.decode_batches or usual.decode_batches,
        options.entries or usual.entries,
    )
    longest = read_attention(options.model or SHIPPED_MODEL).max_model_len
    return works_of(subject.uses, on.registry, on.target, subject.order, sizes, longest)


def _subject(options: TuneOptions, plan: Plan | None, on: Platform, machine: Machine) -> _Subject:
    from metainfer.kernels.tune_record import Conditions
    from metainfer.ops.uses import uses_of
    from metainfer.plan.plan import plain_dtype

    model = options.model or SHIPPED_MODEL
    if plan is not None:
        formats = _formats(plan)
        order, chunk = plan.kernel_order.value, plan.max_num_batched_tokens.value
        conditions = Conditions(plan.plain_cache_dtype, plan.threads.value)
        on.registry.check_order(order)
    else:
        formats, chunk = _unplanned(model, on, machine)
        order = ""
        plain = (formats["latents"], formats["index_keys"], formats["dtype"])
        threads = machine.cpu.physical_cores if on.device == "cpu" else 0
        conditions = Conditions(plain_dtype(*plain), threads)
    layout = layout_of(plan, options.tensor_parallel_size)
    uses = uses_of(model, part=options.part or "", **layout, **formats)
    # What layers bind; of a model that is not served, whatever there is.
    served = tuple(use for use in uses if use.served)
    return _Subject(served or uses, order, chunk, conditions)


def _plan_of(options: TuneOptions) -> Plan | None:
    from metainfer.plan.plan import Plan

    if options.plan is None:
        return None
    try:
        return Plan.from_json(options.plan.read_text("utf-8", "replace"))
    except UserError as error:
        raise UserError(f"{options.plan}: {error.message}", error.hint) from error


def _formats(plan: Any) -> dict[str, Any]:
    """Of a plan or of `plan.formats.Formats`, as `uses_of` takes them."""
    return {
        "dtype": plan.compute_dtype.value,
        "activations": plan.activations.value,
        "latents": plan.cache_dtype.value,
        "index_keys": plan.index_cache_dtype.value,
    }


def _unplanned(model: str, on: Platform, machine: Machine) -> tuple[dict[str, Any], int]:
    """(formats, rows of the largest step) as serve would choose without flags."""
    from metainfer.arch.attention_sides import ATTENTION_ONLY
    from metainfer.arch.families import read_arch, read_attention
    from metainfer.plan.build import DEFAULT_BATCHED_TOKENS
    from metainfer.plan.formats import choose_formats, terms_here
    from metainfer.plan.proof import cache_proof
    from metainfer.plan.settings import EngineSettings
    from metainfer.shipped import model_dir

    if read_attention(model).family in ATTENTION_ONLY:
        formats = {"dtype": "bfloat16", "latents": "bfloat16", "index_keys": "bfloat16"}
        return formats, DEFAULT_BATCHED_TOKENS
    arch, settings = read_arch(model), EngineSettings()
    able = on.registry.capabilities(on.target)
    terms = terms_here(machine, arch, settings, able)
    proof = cache_proof(Path(model_dir(model)), arch, settings, terms)
    return _formats(choose_formats(machine, arch, settings, able, proof)), DEFAULT_BATCHED_TOKENS


def _report(on: Platform, subject: _Subject, found: Sequence[Finding]) -> str:
    """What serve will bind for each operation, and what is never bound."""
    from metainfer.bench.ops_report import format_us, short_case
    from metainfer.bench.record import prose, table
    from metainfer.kernels.tune_record import Found, entry
    from metainfer.kernels.tuned import at_rows

    entries = tuple(entry(finding, subject.conditions) for finding in found)
    registry = on.registry.with_tuned(Found(entries).tuned(on.target, subject.conditions))
    rows, bad = [], []
    for finding, one in zip(found, entries, strict=True):
        name = f"{finding.op} {short_case(one['case'])}"
        bad += [f"NEVER BOUND {name}, {who}: {why}" for who, why in finding.bad]
        choice = registry.choose(finding.op, finding.case, on.target, subject.order)
        default = on.registry.choose(finding.op, finding.case, on.target, subject.order)
        if choice is None or default is None:
            continue
        first = default.parts[-1].candidate
        for size in finding.sizes:
            who = at_rows(choice.parts, size.rows)
            ours, others = size.seconds[who], size.seconds.get(first)
            rows.append(
                [
                    name,
                    format_count(size.rows),
                    who,
                    format_us(ours),
                    first,
                    "-" if others is None else format_us(others),
                    "-" if others is None else f"{others / ours:.2f}",
                ]
            )
            name = ""
    header = ["operation", "rows", "runs on", "us", "default", "us", "times as fast"]
    return "\n".join([table(header, rows), *([""] if bad else []), *map(prose, bad)])


VERB = Verb(
    "kernels tune",
    "Find and keep what runs each operation fastest on this card",
    (("what is tuned", TuneOptions),),
    run,
    (
        "metainfer kernels tune",
        "metainfer kernels tune deepseek-v4-flash --part experts --budget 300",
    ),
)
