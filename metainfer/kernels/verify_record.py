"""Records of verification: what was found on which card, signed by their own hash, and kept.

A record counts for the card, driver, versions and kernel sources that it names, for nothing else.
The hash is over all that the record says, so that a file that was edited is refused; it is no proof
of who made it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch

from metainfer.core.errors import UserError
from metainfer.core.files import replace_file
from metainfer.hardware.machine import Machine, Unknown
from metainfer.kernels.record_fields import (
    CASE,
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    FieldCheck,
    by_name,
    each,
    fields,
    maybe,
    one_line,
    one_of,
    require_fields,
)
from metainfer.kernels.verify_run import Check, Outcome, Sizes, State, Verified, Where
from metainfer.ops.base import case_fields
from metainfer.ops.catalogue import OPS
from metainfer.ops.floor import Rates, operands_of

KIND = "metainfer verify"
RECORD_VERSION = 2
_SOURCES = Path(__file__).parent, Path(__file__).parents[1] / "ops"
_CASES = each(
    fields(
        op=TEXT,
        case=CASE,
        phase=TEXT,
        rows=COUNT,
        tokens=COUNT,
        backend=TEXT,
        state=one_of(State),
        error=maybe(NUMBER),
        tolerance=NUMBER,
        problem=TEXT,
        seconds=maybe(POSITIVE),
        floor_s=maybe(NUMBER),
    )
)
_FIELDS: FieldCheck = fields(
    date=TEXT,
    card=fields(name=TEXT, device=TEXT, code_for=maybe(TEXT), kernels=TEXT),
    cache_dtype=TEXT,
    rates=maybe(
        fields(launch_s=NUMBER, bytes_per_s=NUMBER, flops_per_s=by_name(NUMBER)),
    ),
    whole_sizes=FLAG,
    partial=each(TEXT),
    cases=_CASES,
    **{state.replace(" ", "_"): COUNT for state in State},
)
_GPU = fields(capability=each(COUNT))
_SUFFIXES = (".py", ".c", ".h", ".cu", ".cuh", ".ptx")


def default_cache() -> Path:
    return Path.home() / ".cache" / "metainfer" / "verify"


def card_facts(
    machine: Machine, device: str, code_for: str | None = None, gpu: int | None = None
) -> dict[str, Any]:
    """What a record counts for: card, driver, versions, sources.

    Args:
        gpu: its number; None for the current one.
    """
    facts: dict[str, Any] = {
        "device": device,
        "code_for": code_for,
        "driver": None if isinstance(machine.driver, Unknown) else machine.driver,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "kernels": source_hash(),
    }
    if device == "cuda":
        found = torch.cuda.get_device_properties(gpu)
        facts |= {
            "name": found.name,
            "capability": [found.major, found.minor],
            "multiprocessors": found.multi_processor_count,
            "memory_bytes": found.total_memory,
        }
    else:
        model = machine.cpu.model
        facts |= {
            "name": "unknown" if isinstance(model, Unknown) else model,
            "multiprocessors": machine.cpu.physical_cores,
        }
    return facts


def source_hash() -> str:
    """Of all sources that kernels are made of."""
    digest = hashlib.sha256()
    for directory in _SOURCES:
        for path in sorted(directory.rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(f"{path.relative_to(directory.parent)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def make_record(
    provenance: Mapping[str, Any],
    facts: Mapping[str, Any],
    subject: Mapping[str, Any],
    where: Where,
    sizes: Sizes,
    checks: Sequence[Check],
    verified: Verified,
) -> dict[str, Any]:
    """The signed record. It says that it is partial where checks were not run, or where the sizes
    leave out some of those that `metainfer verify` takes by itself.

    Args:
        provenance: date, command, commit, versions.
        subject: the model, its layout and part.
    """
    cases = [
        _entry(check, outcome, verified.rates)
        for check, outcome in zip(checks, verified.outcomes, strict=True)
    ]
    count = Counter(case["state"] for case in cases)
    whole_sizes = sizes.cover(Sizes.of(where.device))
    partial = []
    if count[State.NOT_RUN]:
        partial.append(f"{count[State.NOT_RUN]} of {len(cases)} checks were not run")
    if not whole_sizes:
        partial.append("sizes that verify takes by itself were left out")
    return sign(
        {
            "kind": KIND,
            "version": RECORD_VERSION,
            **provenance,
            "card": dict(facts),
            **subject,
            "order": where.order,
            "cache_dtype": where.cache_dtype,
            "seed": where.seed,
            "rates": None if verified.rates is None else asdict(verified.rates),
            **{state.replace(" ", "_"): count[state] for state in State},
            "sizes": asdict(sizes),
            "whole_sizes": whole_sizes,
            "partial": partial,
            "cases": cases,
        }
    )


def _entry(check: Check, outcome: Outcome | None, rates: Rates | None) -> dict[str, Any]:
    cost = OPS[check.op].cost(check.case, check.load)
    operands = operands_of(check.case)
    ran = outcome if outcome is not None and outcome.state is not State.NOT_VERIFIED else None
    return {
        "op": check.op,
        "case": case_fields(check.case),
        "phase": check.phase,
        "rows": check.load.rows,
        "tokens": check.load.tokens,
        "backend": "" if outcome is None else outcome.backend,
        "state": State.NOT_RUN if outcome is None else outcome.state,
        "error": ran.error if ran is not None and math.isfinite(ran.error) else None,
        "tolerance": OPS[check.op].tolerance.of(check.case.dtype),
        "problem": "" if ran is None else one_line(ran.problem),
        "seconds": None if ran is None else ran.seconds,
        "floor_s": None if rates is None else rates.floor_s(cost, operands),
        "bound": None if rates is None else rates.bound(cost, operands),
    }


def sign(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the hash of all else that it says."""
    plain = json.loads(json.dumps({k: v for k, v in record.items() if k != "sha256"}))
    return {**plain, "sha256": _digest(plain)}


def read_record(text: str | bytes) -> dict[str, Any]:
    """A record that says what it said when it was made.

    Raises UserError: it is no such record, was changed, or holds what no record does.
    """
    record = read_signed(text, KIND, RECORD_VERSION)
    require_fields(record, _FIELDS)
    if record["card"]["device"] == "cuda":
        require_fields(record["card"], _GPU)
    return record


def read_signed(text: str | bytes, kind: str, version: int) -> dict[str, Any]:
    """As `read_record`, of records of another kind, which is the verb that makes them."""
    try:
        record = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UserError("the file is not a JSON record", hint=str(error)) from error
    if not isinstance(record, dict) or record.get("kind") != kind:
        raise UserError(f"the file is not a record of {kind}")
    if record.get("version") != version:
        raise UserError(f"the record has version {record.get('version')}, this one reads {version}")
    if not _is_signed(record):
        raise UserError("the record was changed after it was made", hint=f"run {kind} again")
    return record


def keep(record: Mapping[str, Any], cache: Path | None = None) -> Path:
    """Write the record where `verify_known` finds it. Raises OSError."""
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = cache / f"{key_of(record['card'])}-{record['sha256'][:12]}.json"
    replace_file(path, json.dumps(record, indent=1).encode())
    return path


def key_of(facts: Mapping[str, Any]) -> str:
    """Names the files of a card and its versions."""
    return _digest(dict(facts))[:16]


def _is_signed(record: dict[str, Any]) -> bool:
    try:
        return sign(record) == record
    except (ValueError, RecursionError):  # such as a number beyond all that JSON can say
        return False


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _digest(plain: Any) -> str:
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
