"""Reference pages made from the code: `python -m metainfer.cli.docs [--check]`.

Flags, environment variables, metrics and operations are described where they are used; these pages
repeat nothing by hand. With --check nothing is written, and pages that differ are named.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metainfer.cli.main import VERBS, load_verb
from metainfer.core.config import described_form, flags_of, written_form
from metainfer.core.env import VARIABLES
from metainfer.core.units import format_bytes, format_count, format_flops
from metainfer.ops.base import Load, Op
from metainfer.ops.targets import CARD_KINDS

_NOTE = "<!-- Made by `make docs` from the code; do not edit. -->"
_ROWS = (1, 2048)  # a decode step, a step of prefill
_TOKENS = 8192
_DIRECTORY = Path(__file__).parents[2] / "docs" / "reference"


def pages() -> Mapping[str, str]:
    """File name -> text of every reference page."""
    return {
        "flags.md": flags_page(),
        "environment.md": environment_page(),
        "metrics.md": metrics_page(),
        "ops.md": ops_page(),
        "../plan-validation.md": validation_page(),
    }


def flags_page() -> str:
    lines = ["Flags", "", "Counts take suffixes as in vLLM: `32k` is 32,000 and `32K` is 32,768."]
    lines += ["`auto` leaves a value to the plan, as not giving the flag does."]
    for name in VERBS:
        verb = load_verb(name)
        lines += ["", f"## metainfer {name}", "", f"{verb.summary}."]
        for title, record in verb.records:
            rows = [(f"`{written_form(b)}`", described_form(b)) for b in flags_of(record)]
            lines += ["", f"### {title}", "", *_table(("flag", "what it does"), rows)]
        if verb.examples:
            lines += ["", "```", *verb.examples, "```"]
    return _page(lines)


def environment_page() -> str:
    rows = [(f"`{v.name}`", v.help, v.default) for v in VARIABLES]
    return _page(
        [
            "Environment variables",
            "",
            "These are all that metainfer reads. Flags win over them.",
            "",
            *_table(("variable", "what it does", "without it"), rows),
        ]
    )


def metrics_page() -> str:
    from metainfer.server.metrics import METRICS, PREFIX

    rows = [
        (f"`{PREFIX}{m.name}`", m.kind, m.unit, ", ".join(("model_name", *m.labels)), m.help)
        for m in METRICS
    ]
    return _page(
        [
            "Metrics",
            "",
            "Served at `/metrics` in Prometheus' text format. Suffixes are vLLM's; Prometheus"
            " appends `_total` to counters.",
            "",
            *_table(("name", "kind", "unit", "labels", "what it is"), rows),
        ]
    )


def ops_page() -> str:
    from metainfer.kernels.on_paper import registry_for
    from metainfer.ops.catalogue import OPS

    registry = registry_for(CARD_KINDS["sm_90"])
    lines = [
        "Operations",
        "",
        "Each operation has one contract and one reference; backends fulfil the whole contract or",
        "say why not. Tolerances are relative to the largest reference value. Beside each case",
        "stands what no implementation can do without: additions and multiplications, and bytes",
        f"moved once, for so many rows whose sequence has {format_count(_TOKENS)} tokens.",
    ]
    for op in OPS.values():
        backends = ", ".join(f"`{name}`" for name in sorted(registry.backends(op.name)))
        tolerance = f"{op.tolerance.float32:g} in float32, {op.tolerance.bfloat16:g} in bfloat16"
        lines += ["", f"## {op.name}", "", "```", *inspect.cleandoc(op.doc).splitlines(), "```", ""]
        lines += [f"Backends: {backends}. Tolerance: {tolerance}."]
        for model, cases in op.cases.items():
            header = (f"case of {model}", *(_counted(rows) for rows in _ROWS))
            lines += ["", *_table(header, (_costs(op, case) for case in cases))]
    return _page(lines)


def validation_page() -> str:
    from metainfer.plan.validate import validate
    from metainfer.plan.validate_text import page_lines

    return _page(page_lines(validate()))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m metainfer.cli.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="name pages that are not current")
    options = parser.parse_args(arguments)
    stale = []
    for name, text in pages().items():
        path = _DIRECTORY / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not options.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    if stale and options.check:
        print(
            f"not current in docs/reference: {', '.join(stale)}; run `make docs`", file=sys.stderr
        )
        return 1
    return 0


def _costs(op: Op, case: Any) -> list[str]:
    """A row of the table of cases: what a call costs at least."""
    costs = (op.cost(case, Load(rows, _TOKENS)) for rows in _ROWS)
    cells = (f"{format_flops(round(c.flops))}, {format_bytes(round(c.bytes))}" for c in costs)
    return [f"`{case}`", *cells]


def _counted(rows: int) -> str:
    return "1 row" if rows == 1 else f"{format_count(rows)} rows"


def _page(lines: Iterable[str]) -> str:
    title, *rest = lines
    return "\n".join([f"# {title}", "", _NOTE, *rest]).rstrip() + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        f"|{'|'.join([' --- '] * len(header))}|",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
