"""`metainfer kernels explain OP`: what runs an operation at each case, and why nothing better."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from metainfer.cli.kernels_coverage import check_targets, target_name
from metainfer.cli.kernels_text import told_case, wrapped
from metainfer.cli.terminal import Terminal
from metainfer.cli.verb import Verb
from metainfer.core.config import REQUIRED, flag
from metainfer.core.errors import UserError
from metainfer.core.ranges import require_least
from metainfer.kernels.tuned import DEFAULT, backend_of
from metainfer.ops.targets import CARD_KINDS

if TYPE_CHECKING:
    from metainfer.ops.base import Op

_CPU = "cpu"
_WIDE = "float32"


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """What is explained."""

    op: str = flag("OP", "An operation; `metainfer kernels list` lists them", REQUIRED)
    model: str | None = flag("--model", "Only the cases of this model: a known name or a directory")
    tensor_parallel_size: int = flag(
        "--tensor-parallel-size",
        "Ranks that share a layer of the model",
        1,
        aliases=("--tp",),
        unit="n",
    )
    targets: tuple[str, ...] = flag(
        "--target",
        f"Where: {_CPU}, " + ", ".join(CARD_KINDS) + "; everywhere if not given",
        (),
        parse=target_name,
        unit="kind",
        many=True,
    )
    json: bool = flag("--json", "Print the verdicts as JSON", False)

    def __post_init__(self) -> None:
        check_targets(self.targets, also=(_CPU,))
        require_least("--tensor-parallel-size", self.tensor_parallel_size, 1)


def run(terminal: Terminal, options: ExplainOptions) -> int:
    op = _op_named(options.op)
    cases = list(_cases(op, options))
    if not cases:
        raise UserError(
            f"{options.model} does not run {op.name}",
            hint="leave --model out for the cases of all known models",
        )
    with terminal.waiting("asking kernels what they take"):
        # Brings torch: names are looked at before.
        from metainfer.kernels.on_paper import has_triton

        there = has_triton()
        told = _explained(op, cases, options.targets or (_CPU, *CARD_KINDS))
    if not there:
        terminal.hint("without triton no kernel for GPUs is here: pip install 'metainfer[kernels]'")
    terminal.data(json.dumps(told, indent=1) if options.json else _text(op, told))
    return 0


def _op_named(name: str) -> Op:
    from metainfer.ops.catalogue import OPS

    if name not in OPS:
        near = difflib.get_close_matches(name, OPS, n=1)
        raise UserError(
            f"there is no operation '{name}'",
            hint=(f"did you mean {near[0]}? " if near else "") + "metainfer kernels list has them",
        )
    return OPS[name]


def _cases(op: Op, options: ExplainOptions) -> Iterator[Any]:
    from metainfer.ops.use import merged
    from metainfer.ops.uses import uses_of
    from metainfer.ops.uses_v4 import ACTIVATIONS

    if options.model is None:
        yield from dict.fromkeys(case for cases in op.cases.values() for case in cases)
        return
    ranks = options.tensor_parallel_size
    forms = [uses_of(options.model, ranks, activations=form) for form in ACTIVATIONS]
    if options.targets == (_CPU,):  # one without bf16 products computes in float32
        forms.append(uses_of(options.model, ranks, dtype=_WIDE, latents=_WIDE, index_keys=_WIDE))
    for use in merged(*forms):
        if use.op == op.name:
            yield use.case


def _explained(op: Op, cases: Sequence[Any], targets: Sequence[str]) -> list[dict[str, Any]]:
    """A record for each case and target."""
    from metainfer.hardware.probe import probe
    from metainfer.kernels.on_paper import choose, registry_for
    from metainfer.kernels.tune_record import find_here
    from metainfer.ops.base import Target

    machine = probe()
    told = []
    for name in targets:
        kind = CARD_KINDS.get(name)
        target = Target(_CPU) if kind is None else kind.target
        registry = registry_for(kind).with_tuned(find_here(machine, target).tuned(target))
        for case in cases:
            choice = choose(registry, op.name, case, target)
            told.append(
                {
                    "case": asdict(case),
                    "target": name,
                    "chosen": choice.backend,
                    "parts": [asdict(part) for part in choice.parts],
                    "runs_on": choice.runs_on,
                    "why": choice.why,
                    "order": list(registry.capabilities(target).default_order_of(op.name)),
                    "verdicts": [
                        {"backend": backend, "serves": verdict.ok, "reason": verdict.reason}
                        for backend, verdict in registry.explain(op.name, case, target)
                    ],
                }
            )
    return told


def _text(op: Op, told: Sequence[dict[str, Any]]) -> str:
    """A paragraph a case; targets that say the same share a line."""
    lines = wrapped(f"{op.name}: {op.doc.strip().splitlines()[0]}")
    by_case: dict[str, dict[str, list[str]]] = {}
    for one in told:
        alike = by_case.setdefault(told_case(one["case"]), {})
        alike.setdefault(_verdict(one), []).append(one["target"])
    for case, alike in by_case.items():
        lines += ["", case]
        for verdict, names in alike.items():
            lines += wrapped(f"{' '.join(names)}: {verdict}", "  ")
    return "\n".join(lines)


def _verdict(one: dict[str, Any]) -> str:
    chosen = one["runs_on"] + ("" if one["why"] == DEFAULT else f" ({one['why']})")
    running = {backend_of(part["candidate"]) for part in one["parts"]}
    others = [
        f"{verdict['backend']}: {verdict['reason'] or 'serves it too'}"
        for verdict in one["verdicts"]
        if verdict["backend"] not in running and verdict["backend"] in one["order"]
    ]
    told = f"{chosen} runs" if one["chosen"] else "nothing but the reference"
    return "; ".join([told, *others])


VERB = Verb(
    "kernels explain",
    "Say what runs an operation, and why nothing better",
    (("what is explained", ExplainOptions),),
    run,
    (
        "metainfer kernels explain attention.sparse_prefill",
        "metainfer kernels explain hc.mix --model deepseek-v4-flash --target sm_89",
    ),
)
