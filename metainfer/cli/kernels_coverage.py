"""`metainfer kernels coverage`: a model's operations on a kind of card, proved by compiling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from metainfer.cli.kernels_text import coverage_text
from metainfer.cli.machine_flag import machine_flag
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import flag
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_least
from metainfer.hardware.machine import Machine, Unknown
from metainfer.ops.cache_formats import INDEX_DTYPES, LATENT_DTYPES
from metainfer.ops.targets import CARD_KINDS, CardKind
from metainfer.ops.use import PARTS
from metainfer.shipped import SHIPPED_MODEL

_MOST_WORKERS = 16  # each has torch in memory


def target_name(text: str) -> str:
    """ "sm_89", which may also be written 89."""
    return f"sm_{text}" if text.isdigit() else text


def check_targets(names: Sequence[str], also: Sequence[str] = ()) -> None:
    """Raises UserError naming one that is no kind of card, nor one of `also`."""
    for name in names:
        if name not in CARD_KINDS and name not in also:
            raise UserError(
                f"--target: there are no kernels for '{name}'",
                hint="there are for " + ", ".join((*also, *CARD_KINDS)),
            )


@dataclass(frozen=True, slots=True)
class CoverageOptions:
    """What is covered."""

    model: str | None = flag(
        "MODEL",
        "A known name, a checkpoint directory or a config.json; the shipped model if not given",
        aliases=("--model",),
    )
    tensor_parallel_sizes: tuple[int, ...] = flag(
        "--tensor-parallel-size",
        "Ranks that share a layer; one of them is covered",
        (1,),
        aliases=("--tp",),
        unit="n",
        many=True,
    )
    prefill_context_parallel_size: int = flag(
        "--prefill-context-parallel-size",
        "Of these ranks, how many share the tokens of long prefills",
        1,
        unit="n",
    )
    decode_context_parallel_size: int = flag(
        "--decode-context-parallel-size",
        "Of these ranks, how many divide the caches of a sequence",
        1,
        unit="n",
    )
    targets: tuple[str, ...] = flag(
        "--target",
        "Kinds of card: " + ", ".join(CARD_KINDS) + "; all if not given",
        (),
        parse=target_name,
        unit="kind",
        many=True,
    )
    machine: str | None = machine_flag()
    prefill_rows: tuple[int, ...] = flag(
        "--prefill-rows",
        "Rows of steps of prefill",
        (1, 16, 128, 1024, 8192),
        unit="rows",
        many=True,
    )
    decode_batches: tuple[int, ...] = flag(
        "--decode-batches", "Rows of steps of decode", (1, 4, 16, 64, 256), unit="rows", many=True
    )
    part: str | None = flag("--part", "Only the operations of this part", choices=PARTS)
    kv_cache_dtype: str | None = flag(
        "--kv-cache-dtype",
        "Format of the caches of latents that layers bind",
        choices=LATENT_DTYPES,
    )
    index_cache_dtype: str | None = flag(
        "--index-cache-dtype", "Format of index keys that layers bind", choices=INDEX_DTYPES
    )
    kernel_order: str | None = flag(
        "--kernel-order", "Implementations to try, best first, as 'op=backend,backend;*=...'"
    )
    workers: int | None = flag(
        "--workers", "Processes that compile; one per core, at most 16", unit="n"
    )
    json: bool = flag("--json", "Print all that was found as JSON", False)

    def __post_init__(self) -> None:
        check_targets(self.targets)
        if self.targets and self.machine is not None:
            raise UserError(
                "--target and --machine both say which cards are meant",
                hint="leave one of them out",
            )
        require_least("--tensor-parallel-size", self.tensor_parallel_sizes, 1)
        require_least("--prefill-context-parallel-size", self.prefill_context_parallel_size, 1)
        require_least("--decode-context-parallel-size", self.decode_context_parallel_size, 1)
        require_least("--prefill-rows", self.prefill_rows, 1)
        require_least("--decode-batches", self.decode_batches, 1)
        require_least("--workers", self.workers, 1)


def kinds_of(machine: Machine, name: str) -> dict[str, CardKind]:
    """The kinds of card of a machine, with its own multiprocessors, by the name of the target.

    Raises UserError where there are no GPUs, or cards that there are no kernels for.
    """
    if isinstance(machine.gpus, Unknown) or not machine.gpus:
        why = machine.gpus.why if isinstance(machine.gpus, Unknown) else "none is listed"
        raise UserError(f"--machine {name} has no known GPU ({why})", hint="name a --target")
    targets = {kind.capability: target for target, kind in CARD_KINDS.items()}
    kinds: dict[str, CardKind] = {}
    for gpu in machine.gpus:
        target = targets.get(gpu.capability)
        if target is None:
            major, minor = gpu.capability
            raise UserError(
                f"--machine {name}: there are no kernels for sm_{major}{minor} ({gpu.name})",
                hint="there are for " + ", ".join(CARD_KINDS),
            )
        kind, count = CARD_KINDS[target], gpu.multiprocessors
        count = kind.multiprocessors if isinstance(count, Unknown) else count
        kinds.setdefault(target, replace(kind, multiprocessors=count, card=gpu.name))
    return kinds


def run(terminal: Terminal, options: CoverageOptions) -> int:
    from metainfer.hardware.known import machine_of

    kinds = {target: CARD_KINDS[target] for target in options.targets or CARD_KINDS}
    if options.machine is not None:
        kinds = kinds_of(machine_of(options.machine), options.machine)
    from metainfer.kernels.on_paper import has_triton

    if not has_triton():
        raise UserError(
            "the kernels for GPUs need triton, which is not installed",
            hint="pip install 'metainfer[kernels]'",
        )
    reports = _reports(terminal, options, kinds)
    if options.json:
        terminal.data(json.dumps(reports, indent=1))
    else:
        terminal.data("\n\n".join(coverage_text(report) for report in reports))
    return 1 if any(report["uncovered"] for report in reports) else 0


def _reports(
    terminal: Terminal, options: CoverageOptions, kinds: dict[str, CardKind]
) -> list[dict[str, Any]]:
    """One for each target and layout."""
    from metainfer.arch.families import read_attention
    from metainfer.hardware.probe import probe
    from metainfer.kernels.coverage import Request, cover
    from metainfer.kernels.coverage_report import Subject, cards_that_ran, report
    from metainfer.kernels.tune_record import find_here
    from metainfer.kernels.tuned import UNTUNED
    from metainfer.ops.use import merged
    from metainfer.ops.uses import uses_of
    from metainfer.plan.caches import cache_dtypes
    from metainfer.plan.settings import EngineSettings

    model, part = options.model or SHIPPED_MODEL, options.part or ""
    shared = options.prefill_context_parallel_size, options.decode_context_parallel_size
    subjects = [
        Subject(model, ranks, part, target, kind, *shared)
        for target, kind in kinds.items()
        for ranks in options.tensor_parallel_sizes
    ]
    longest = read_attention(model).max_model_len
    given = EngineSettings(
        kv_cache_dtype=options.kv_cache_dtype, index_cache_dtype=options.index_cache_dtype
    )
    latents, keys = (dtype.value for dtype in cache_dtypes(given, "bfloat16"))
    layout: dict[str, Any] = dict(zip(("context", "kv_shards"), shared, strict=True))
    kept: dict[str, Any] = {"latents": latents, "index_keys": keys, "activations": "fp8"}
    uses = {
        # What a GPU binds, which rounds rows of quantised matrices, and the forms without.
        ranks: merged(
            uses_of(model, ranks, part, **kept, **layout),
            uses_of(model, ranks, part, **layout),
        )
        for ranks in options.tensor_parallel_sizes
    }
    machine = probe()
    tuned = dict.fromkeys(kinds, UNTUNED)
    if options.machine is None:
        tuned = {
            target: find_here(machine, kind.target).tuned(kind.target)
            for target, kind in kinds.items()
        }
    requests = [Request(uses[one.ranks], one.kind, longest, tuned[one.target]) for one in subjects]
    workers = options.workers or min(_MOST_WORKERS, machine.cpu.logical_cores)
    with terminal.progress("compiled", "pieces of code") as progress:
        found = cover(
            requests,
            workers,
            options.kernel_order or "",
            options.prefill_rows,
            options.decode_batches,
            on_progress=progress.update,
        )
    ran = {target: cards_that_ran(target) for target in kinds}
    return [
        report(subject, rows, ran[subject.target])
        for subject, rows in zip(subjects, found, strict=True)
    ]


VERB = Verb(
    "kernels coverage",
    "Prove by compiling what a model's operations run on",
    (("what is covered", CoverageOptions),),
    run,
    (
        "metainfer kernels coverage deepseek-v4-flash --tensor-parallel-size 8 --target sm_120",
        "metainfer kernels coverage glm-5.3 --tensor-parallel-size 1 4 8 --part attention --json",
        "metainfer kernels coverage deepseek-v4.1-flash --machine rtx-6000d-x8 --tp 1 2 4 8",
    ),
)
