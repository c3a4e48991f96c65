"""What coverage found, as a plain record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metainfer.kernels.coverage import Row
from metainfer.kernels.triton.launch import shared_limit
from metainfer.kernels.verify_known import Name, Proof, add_proofs, records
from metainfer.kernels.verify_record import source_hash
from metainfer.ops.base import Load, case_fields
from metainfer.ops.catalogue import OPS
from metainfer.ops.floor import operands_of
from metainfer.ops.targets import CardKind
from metainfer.ops.use import DECODE, Use

_TOKENS = 8192
_ROWS = 2048  # of a chunk of a prompt
_SEQUENCES = 16  # of a decode step

Ran = Mapping[Name, str]
"""By (op, case as JSON, backend): the card on which `metainfer verify` passed it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What was covered: one of `ranks` ranks of a model on one kind of card.

    Attributes:
        context: of these ranks, which share the tokens of long prefills.
        kv_shards: of these ranks, which divide the caches of a sequence.
    """

    model: str
    ranks: int
    part: str
    target: str
    kind: CardKind
    context: int = 1
    kv_shards: int = 1


def cards_that_ran(target: str, cache: Path | None = None) -> Ran:
    """What passed on cards of the kind `target`, or elsewhere as code for it, with these very
    sources; of several records the latest counts.

    Args:
        cache: of verification's records; None for the user's.
    """
    proofs: dict[Name, Proof] = {}
    cards: dict[Name, str] = {}
    sources = source_hash()
    for record in records("*.json", cache):
        card = record["card"]
        if card["kernels"] == sources and _code_of(card) == target:
            for name, proof in add_proofs(proofs, record).items():
                if proof is Proof.WHOLE:
                    cards[name] = card["name"]
    return {name: cards[name] for name, proof in proofs.items() if proof is Proof.WHOLE}


def _code_of(card: Mapping[str, Any]) -> str:
    """The kind of card whose code ran."""
    if card["device"] != "cuda":
        return ""
    major, minor = card["capability"]
    return card["code_for"] or f"sm_{major}{minor}"


def report(subject: Subject, rows: Sequence[Row], ran: Ran) -> dict[str, Any]:
    """Everything that was found."""
    return {
        "model": subject.model,
        "tensor_parallel_size": subject.ranks,
        "prefill_context_parallel_size": subject.context,
        "decode_context_parallel_size": subject.kv_shards,
        "part": subject.part or None,
        "target": subject.target,
        "card": subject.kind.card,
        "shared_limit_bytes": shared_limit(subject.kind.capability),
        "covered": sum(row.ok for row in rows),
        "uncovered": sum(not row.ok for row in rows),
        "rows": [_row(row, ran) for row in rows],
    }


def least(use: Use, phase: str) -> dict[str, Any]:
    """What one call of a usual size cannot do without, whatever runs it: a chunk of a prompt, or a
    decode step of several sequences."""
    rows = _SEQUENCES if phase == DECODE else _ROWS
    cost = OPS[use.op].cost(use.case, Load(rows, _TOKENS))
    return {
        "rows": rows,
        "tokens": _TOKENS,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "operands": operands_of(use.case),
    }


def _row(row: Row, ran: Ran) -> dict[str, Any]:
    case = case_fields(row.use.case)
    name = row.use.op, json.dumps(case, sort_keys=True), row.backend
    return {
        "op": row.use.op,
        "case": case,
        "part": row.use.part,
        "phase": row.phase,
        "times": row.use.times,
        "least": least(row.use, row.phase),
        "served": row.use.served,
        "backend": row.backend,
        "runs_on": row.runs_on,
        "why": row.why,
        "refused": [{"backend": name, "reason": reason} for name, reason in row.refused],
        "ok": row.ok,
        "problems": row.problems,
        "ran_on": ran.get(name),
        "launches": row.launches,
        "torch_calls": list(row.torch_calls),
        "shared_bytes": row.most("shared_bytes"),
        "registers": row.most("registers"),
        "stack_bytes": row.most("stack_bytes"),
        "matrix": list(row.matrix),
        "code": [
            {
                "kernel": piece.kernel,
                "constants": piece.constants,
                "problem": piece.problem,
                **(asdict(piece.code) if piece.code else {}),
            }
            for piece in row.pieces
        ],
    }
