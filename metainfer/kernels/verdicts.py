"""Verdicts: which implementation every operation of a model would get on a card, without compiling.

The report has the form of `coverage_report.report`, with "compiled" false and no facts of code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from metainfer.kernels.coverage_report import Ran, Subject, least
from metainfer.kernels.on_paper import choose, registry_for
from metainfer.kernels.triton.launch import shared_limit
from metainfer.ops.base import case_fields
from metainfer.ops.use import Use

NO_KERNEL_SERVES = "only the reference serves it"


def verdict_report(subject: Subject, uses: Iterable[Use], ran: Ran) -> dict[str, Any]:
    """What would be bound, and why nothing better, for each use and phase."""
    registry, target = registry_for(subject.kind), subject.kind.target
    rows = []
    for use in uses:
        choice = choose(registry, use.op, use.case, target)
        case = case_fields(use.case)
        name = use.op, json.dumps(case, sort_keys=True), choice.backend
        for phase in use.phases:
            rows.append(
                {
                    "op": use.op,
                    "case": case,
                    "part": use.part,
                    "phase": phase,
                    "times": use.times,
                    "least": least(use, phase),
                    "served": use.served,
                    "backend": choice.backend,
                    "refused": [{"backend": b, "reason": r} for b, r in choice.refused],
                    "ok": not choice.is_slow,
                    "problems": [NO_KERNEL_SERVES] if choice.is_slow else [],
                    "ran_on": ran.get(name),
                }
            )
    return {
        "model": subject.model,
        "tensor_parallel_size": subject.ranks,
        "part": None,
        "target": subject.target,
        "card": subject.kind.card,
        "compiled": False,
        "shared_limit_bytes": shared_limit(subject.kind.capability),
        "covered": sum(row["ok"] for row in rows),
        "uncovered": sum(not row["ok"] for row in rows),
        "rows": rows,
    }
