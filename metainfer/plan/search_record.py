"""What a search found, as a record for other programs (docs/reference/plan-record.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from metainfer.arch.shapes import shape_key
from metainfer.hardware.machine import gpus_of
from metainfer.hardware.topology import fingerprint
from metainfer.plan.cost.phases import Step
from metainfer.plan.cost.transfers import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from metainfer.plan.found import Candidate
from metainfer.plan.gains import Outlook
from metainfer.plan.search import Result

RECORD_VERSION = 1
KIND = "layout plan"
_SIZES = (4096, 65536, 2**20, 2**24, 2**27)


def record(result: Result, ahead: Outlook | None = None, shown: int = 10) -> dict[str, Any]:
    """JSON-ready. Seconds, bytes, tokens."""
    gpus = gpus_of(result.machine)
    return {
        "version": RECORD_VERSION,
        "kind": KIND,
        "model": result.shape.name,
        "model_key": shape_key(result.shape),
        "machine": {
            "gpus": [gpu.name for gpu in gpus],
            "fingerprint": fingerprint(result.machine),
        },
        "workload": asdict(result.workload),
        "objective": result.objective,
        "engine": result.profile.name,
        "engine_meaning": result.profile.meaning,
        "gathers_codes": result.phases.gathers_codes,
        "chosen": {**_candidate(result.best), "time": _times(result.best)},
        "transports": _transports(result),
        "runners_up": [_candidate(one) for one in result.ranked[1:shown]],
        "rejected": [asdict(rejection) for rejection in result.rejected],
        "notes": list(result.notes),
        **({} if ahead is None else _ahead(ahead)),
    }


def _ahead(ahead: Outlook) -> dict[str, Any]:
    return {
        "longest_context_tokens": ahead.longest_context,
        "not_chosen": [
            {
                "what": gain.what,
                "flag": gain.flag,
                "proof": gain.proof,
                "longest_context_tokens": gain.longest_context,
                "best": None if gain.result is None else _candidate(gain.result.best),
            }
            for gain in ahead.gains
        ],
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    told = one.prediction
    return {
        "name": one.layouts.name,
        "prefill": asdict(one.layouts.prefill),
        "decode": asdict(one.layouts.decode),
        "formats": asdict(one.formats),
        "predicted": {
            "input_tokens_per_s": told.input_per_s,
            "ttft_s": told.ttft_or_none,
            "tpot_s": told.tpot_s,
            "output_tokens_per_s": told.output_per_s,
            "requests_per_s": told.requests_per_s,
            "input_uncertainty": told.input_error,
            "decode_uncertainty": told.decode_error,
            "load": told.load,
        },
        "memory": {
            "total_bytes": one.ledger.total_bytes,
            "limit_bytes": one.ledger.limit_bytes,
            "lines": [_line(line) for line in getattr(one.ledger, "lines", ())],
        },
        "why_not": one.why,
    }


def _line(line: Any) -> Mapping[str, Any]:
    return {"name": line.name, "bytes": line.bytes, "why": line.why}


def _times(one: Candidate) -> dict[str, Any]:
    return {
        "prompt_token": _items(one.prediction.prefill),
        "decode_step": _items(one.prediction.decode),
    }


def _items(step: Step) -> list[dict[str, Any]]:
    return [
        {"group": item.group, "seconds": item.seconds, "origin": item.origin, "why": item.why}
        for item in sorted(step.items, key=lambda item: -item.seconds)
        if item.seconds > 0
    ]


def _transports(result: Result) -> list[dict[str, Any]]:
    """The fastest way of each exchange and size class, for the groups of the chosen layout."""
    one = result.best.layouts.decode
    groups = one.replicas * one.pipeline
    if one.group == 1:
        return []
    found = []
    for operation in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER):
        for size in _SIZES:
            way = result.phases.transfers.exchange(operation, float(size), one.group, groups)
            found.append(
                {
                    "operation": operation,
                    "bytes": size,
                    "means": way.means,
                    "seconds": way.seconds,
                    "origin": way.origin,
                    "why": way.why,
                }
            )
    return found
