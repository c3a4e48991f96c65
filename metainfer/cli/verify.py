"""`metainfer verify`: every operation of a model against its reference, on the card at hand."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag, parse_positive
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_least
from metainfer.core.units import format_count, format_seconds
from metainfer.hardware.device_names import parse_device
from metainfer.hardware.machine import Machine, Unknown
from metainfer.ops.use import PARTS
from metainfer.shipped import SHIPPED_MODEL

if TYPE_CHECKING:
    from metainfer.kernels.verify_run import Check, Sizes
    from metainfer.plan.plan import Plan

_MOST_WORKERS = 4
_NOT_ALL_RUN = 3  # exit code
_WORKER_BYTES = 6 * 2**30  # of the device's memory, that most checks do with
_BEATEN = 1.1
"""A floor of so many times the time is beaten by more than timing is unsure of."""
_SHARE = 0.9
"""Of the free memory: contexts of processes on a GPU take the rest."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What is verified, at which sizes, and where the record goes."""

    model: str | None = flag(
        "MODEL",
        "A known name or a checkpoint directory; the shipped model if not given",
        aliases=("--model",),
    )
    plan: Path | None = flag(
        "--plan",
        "A plan whose layout, formats and kernel order hold, as JSON; it does not name its MODEL",
    )
    tensor_parallel_size: int | None = flag(
        "--tensor-parallel-size",
        "Ranks that share a layer; one of them is verified",
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
    code_for: str | None = flag(
        "--as", "Verify the code for this older GPU, such as sm_89", unit="target"
    )
    entries: tuple[int, ...] = flag(
        "--entries",
        "Entries of context (tokens where a layer does not compress); 2K 32K 128K on a GPU, 2K on a"
        " CPU",
        (),
        unit="n",
        many=True,
    )
    prefill_rows: int | None = flag(
        "--prefill-rows", "Rows of a step of prefill; 2,048 on a GPU, 64 on a CPU", unit="rows"
    )
    decode_batches: tuple[int, ...] = flag(
        "--decode-batches", "Rows of steps of decode", (1, 4), unit="rows", many=True
    )
    budget_s: float | None = flag(
        "--budget",
        "Begin no check after this time; where some are not run the record is partial, and the exit"
        " code is 3",
        unit="seconds",
        parse=parse_positive,
    )
    workers: int | None = flag("--workers", "Processes that compare at once", unit="n")
    seed: int | None = flag("--seed", "Fixes the inputs; drawn if not given")
    out: Path | None = flag("--out", "Write the record to this file too", unit="file")
    show: Path | None = flag(
        "--show", "Print this record, if nobody changed it, and verify nothing", unit="file"
    )
    json: bool = flag("--json", "Print the record to stdout instead of the table", False)

    def __post_init__(self) -> None:
        if self.plan is not None and self.model is None and self.show is None:
            raise UserError(
                "--plan: a plan does not name its model",
                hint=f"metainfer verify MODEL --plan {self.plan}",
            )
        require_least("--tensor-parallel-size", self.tensor_parallel_size, 1)
        require_least("--entries", self.entries, 1)
        require_least("--prefill-rows", self.prefill_rows, 1)
        require_least("--decode-batches", self.decode_batches, 1)
        require_least("--workers", self.workers, 1)


def run(terminal: Terminal, options: VerifyOptions) -> int:
    from metainfer.bench.record import check_place, provenance, write_json
    from metainfer.hardware.probe import probe
    from metainfer.kernels.platform import platform
    from metainfer.kernels.verify_record import card_facts, keep, make_record, read_record
    from metainfer.kernels.verify_run import Where, verify
    from metainfer.plan.plan import Plan

    if options.show is not None:
        with _naming(options.show):
            shown = read_record(options.show.read_bytes())
        return _told(terminal, options, shown)
    plan = None
    if options.plan is not None:
        with _naming(options.plan):
            plan = Plan.from_json(options.plan.read_text("utf-8", "replace"))
    if options.out is not None:
        check_place(options.out, "--out")
    on = platform(options.device, options.code_for)
    machine = probe()
    layout = layout_of(plan, options.tensor_parallel_size)
    order = plan.kernel_order.value if plan else ""
    on.registry.check_order(order)
    sizes = sizes_for(options, on.device)
    forms = forms_of(options.model or SHIPPED_MODEL, on.device, plan)
    checks = checks_for(options, sizes, **layout, **forms)
    where = Where(
        on.device,
        options.code_for,
        order,
        secrets.randbelow(2**31) if options.seed is None else options.seed,
        plan.plain_cache_dtype if plan else forms["dtype"],
        options.device,
    )
    facts = card_facts(machine, on.device, options.code_for)
    memory_bytes = memory_for(machine, on.device, facts.get("memory_bytes"))
    workers = options.workers or usual_workers(machine, memory_bytes)
    terminal.say(f"{format_count(len(checks))} checks on {on.name} as {on.target}")
    with terminal.progress("verified", "steps") as progress:
        verified = verify(where, checks, workers, progress.update, options.budget_s, memory_bytes)
    record = make_record(
        provenance(),
        facts,
        {
            "model": options.model or SHIPPED_MODEL,
            "tensor_parallel_size": layout["ranks"],
            "part": options.part,
        },
        where,
        sizes,
        checks,
        verified,
    )
    if options.out is not None:
        write_json(options.out, record)
        terminal.say(f"record: {options.out}")
    try:
        kept = keep(record)
        if options.out is None:
            terminal.say(f"record: {kept}")
    except OSError as error:
        terminal.hint(f"the record is not kept where serve looks for it: {error}")
    return _told(terminal, options, record)


def memory_for(machine: Machine, device: str, card_bytes: int | None) -> int | None:
    """What all workers together may take of the device, or of the host where that computes: nearly
    all that is free. None where nobody knows.

    Args:
        card_bytes: that the GPU has in all.
    """
    if device == "cpu":
        free = machine.memory.available_bytes
        return None if isinstance(free, Unknown) else int(_SHARE * free)
    gpus = [] if isinstance(machine.gpus, Unknown) else machine.gpus
    free = min((gpu.free_bytes for gpu in gpus), default=card_bytes or 0)
    return int(_SHARE * free) or None


def usual_workers(machine: Machine, memory_bytes: int | None) -> int:
    """As many as there are cores and memory for."""
    room = _MOST_WORKERS if memory_bytes is None else memory_bytes // _WORKER_BYTES
    return max(1, min(_MOST_WORKERS, machine.cpu.physical_cores, room))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the file's content begin with its name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error.message}", error.hint) from error


def _told(terminal: Terminal, options: VerifyOptions, record: Mapping[str, Any]) -> int:
    terminal.data(json.dumps(record, indent=2) if options.json else report(record))
    if record["failed"]:
        return 1
    if record["not_run"]:
        return _NOT_ALL_RUN
    return 0 if record["passed"] else 1


def sizes_for(options: VerifyOptions, device: str) -> Sizes:
    """Sizes that were asked for, and for the rest those of the device."""
    from metainfer.kernels.verify_run import Sizes

    usual = Sizes.of(device)
    return Sizes(
        options.prefill_rows or usual.prefill_rows,
        options.decode_batches or usual.decode_batches,
        options.entries or usual.entries,
    )


def layout_of(plan: Plan | None, ranks: int | None) -> dict[str, Any]:
    """How ranks share the model, as `ops.uses.uses_of` takes it: as the plan has it, or so many
    ranks where a number was given."""
    if plan is None or ranks is not None:
        return {"ranks": ranks or 1}
    return {
        "ranks": plan.tensor_parallel_size.value,
        "expert": plan.expert_parallel_size.value,
        "context": plan.prefill_context_parallel_size.value,
        "kv_shards": plan.decode_context_parallel_size.value,
    }


def forms_of(model: str, device: str, plan: Plan | None) -> dict[str, Any]:
    """What layers bind, as `ops.uses.uses_of` takes it: by the plan, or as plans have it on the
    device where no flag says otherwise."""
    from metainfer.ops.uses import usual_activations

    if plan is None:
        return {"dtype": "bfloat16", "activations": usual_activations(model, device)}
    return {
        "dtype": plan.compute_dtype.value,
        "activations": plan.activations.value,
        "latents": plan.cache_dtype.value,
        "index_keys": plan.index_cache_dtype.value,
    }


def checks_for(
    options: VerifyOptions, sizes: Sizes, ranks: int, dtype: str, **forms: Any
) -> list[Check]:
    """All checks at some sizes; `forms`: formats and layout, as of `ops.uses.uses_of`."""
    from metainfer.arch.families import read_attention
    from metainfer.kernels.inputs.load import LOADED
    from metainfer.kernels.verify import checks_of
    from metainfer.ops.uses import uses_of

    model = options.model or SHIPPED_MODEL
    uses = [
        (use.op, use.case, phase)
        for use in uses_of(model, ranks, options.part or "", dtype, **forms)
        if use.op in LOADED
        for phase in use.phases
    ]
    return checks_of(uses, sizes, read_attention(model).max_model_len)


def report(record: Mapping[str, Any]) -> str:
    """The record as a table, what failed once more below it."""
    from metainfer.bench.ops_report import format_us, short_case
    from metainfer.bench.record import prose, table
    from metainfer.kernels.verify_run import State

    marks = {
        State.PASSED: "ok",
        State.FAILED: "FAILED",
        State.NOT_RUN: "not run",
        State.NOT_VERIFIED: "-",
    }
    rows = []
    for case in record["cases"]:
        seconds, floor_s = case["seconds"], case["floor_s"]
        rows.append(
            [
                f"{case['op']} {short_case(case['case'])}",
                case["phase"],
                format_count(case["rows"]),
                _short(case["tokens"]),
                case["backend"] or "none",
                marks[case["state"]],
                "-" if case["error"] is None else f"{case['error']:.1e}",
                f"{case['tolerance']:.0e}",
                "-" if seconds is None else format_us(seconds),
                "-" if floor_s is None else format_us(floor_s),
                "-" if seconds is None or floor_s is None else f"{floor_s / seconds:.0%}",
            ]
        )
    header = [
        "operation",
        "phase",
        "rows",
        "tokens",
        "runs on",
        "",
        "error",
        "limit",
        "us",
        "floor",
        "of floor",
    ]
    card = record["card"]
    told = [
        *_failures(record["cases"]),
        f"{record['passed']} of {len(rows)} checks passed on {card['name']}"
        + (f" as {card['code_for']}" if card["code_for"] else "")
        + "".join(
            f"; {record[name]} {what}"
            for name, what in (
                ("failed", "failed"),
                ("not_run", "were not run for want of time"),
                ("not_verified", "were not verified: references run them"),
            )
            if record[name]
        ),
        *(f"partial: {reason}; serve does not count it as passed" for reason in record["partial"]),
        *_beaten(record["cases"]),
        *_rates(record["rates"]),
        f"sha256 {record['sha256']}",
    ]
    return "\n".join([table(header, rows), "", *map(prose, told)])


def _short(tokens: int) -> str:
    """As --entries takes them: 32768 -> "32K"."""
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else format_count(tokens)


def _beaten(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """A word on floors that times lie below, which none does on a machine at rest."""
    timed = [c for c in cases if c["seconds"] is not None and c["floor_s"] is not None]
    beaten = sum(c["floor_s"] > _BEATEN * c["seconds"] for c in timed)
    if not beaten:
        return []
    return [
        f"{beaten} of {len(timed)} times lie below their floor: the rates under it were measured"
        " while something else ran here, or caches hold what it takes from memory; trust no share"
        " unless the machine is at rest"
    ]


def _rates(rates: Mapping[str, Any] | None) -> list[str]:
    if rates is None:
        return []
    flops = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates["flops_per_s"].items())
    return [
        f"launch {format_seconds(rates['launch_s'])}; copy {rates['bytes_per_s'] / 1e9:,.0f} GB/s;"
        f" products {flops} TFLOP/s"
    ]


def _failures(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    from metainfer.bench.ops_report import short_case

    return [
        f"FAILED {case['op']} {short_case(case['case'])}, {case['phase']} of {case['rows']} rows at"
        f" {format_count(case['tokens'])} tokens, on {case['backend'] or 'nothing'}:"
        f" {case['problem']}"
        for case in cases
        if case["problem"]
    ]


VERB = Verb(
    "verify",
    "Check every operation of a model on this card",
    (("what is verified", VerifyOptions),),
    run,
    (
        "metainfer verify deepseek-v4-flash --part attention",
        "metainfer verify deepseek-v4-flash --as sm_89 --out verify.json",
        "metainfer verify --show verify.json",
    ),
)
