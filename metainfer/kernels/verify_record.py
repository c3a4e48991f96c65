"""Records of verification: what was found on which card, signed by their own hash, and kept.

A record counts for the card, driver, versions and kernel sources that it names, for nothing else.
The hash is over all that the record says, so that a file that was edited is refused; it is no proof
of who made it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch

from metainfer.core.errors import UserError
from metainfer.hardware.machine import Machine, Unknown
from metainfer.kernels.registry import Kernel
from metainfer.kernels.verify_run import Check, Outcome, Verified, Where
from metainfer.ops.catalogue import OPS
from metainfer.ops.floor import Rates, operands_of

KIND = "metainfer verify"
RECORD_VERSION = 1
_SOURCES = Path(__file__).parent, Path(__file__).parents[1] / "ops"
_SUFFIXES = (".py", ".c", ".cu", ".cuh", ".ptx")

Passed = frozenset[tuple[str, str, str]]  # (op, case, backend)


def default_cache() -> Path:
    return Path.home() / ".cache" / "metainfer" / "verify"


def card_facts(machine: Machine, device: str, code_for: str | None = None) -> dict[str, Any]:
    """What a record counts for: card, driver, versions, sources."""
    facts: dict[str, Any] = {
        "device": device,
        "code_for": code_for,
        "driver": None if isinstance(machine.driver, Unknown) else machine.driver,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "kernels": source_hash(),
    }
    if device == "cuda":
        found = torch.cuda.get_device_properties()
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
    checks: Sequence[Check],
    verified: Verified,
) -> dict[str, Any]:
    """The signed record.

    Args:
        provenance: date, command, commit, versions.
        subject: the model, its layout and part.
    """
    cases = [
        _entry(check, outcome, verified.rates)
        for check, outcome in zip(checks, verified.outcomes, strict=True)
        if outcome is not None
    ]
    return sign(
        {
            "kind": KIND,
            "version": RECORD_VERSION,
            **provenance,
            "card": dict(facts),
            **subject,
            "order": where.order,
            "seed": where.seed,
            "rates": None if verified.rates is None else asdict(verified.rates),
            "passed": sum(not case["problem"] for case in cases),
            "failed": sum(bool(case["problem"]) for case in cases),
            "left_out": len(checks) - len(cases),
            "cases": cases,
        }
    )


def _entry(check: Check, outcome: Outcome, rates: Rates | None) -> dict[str, Any]:
    cost = OPS[check.op].cost(check.case, check.load)
    operands = operands_of(check.case)
    return {
        "op": check.op,
        "case": asdict(check.case),
        "phase": check.phase,
        "rows": check.load.rows,
        "tokens": check.load.tokens,
        "backend": outcome.backend,
        "error": outcome.error if math.isfinite(outcome.error) else None,
        "tolerance": OPS[check.op].tolerance.of(check.case.dtype),
        "problem": outcome.problem,
        "seconds": outcome.seconds,
        "floor_s": None if rates is None else rates.floor_s(cost, operands),
        "bound": None if rates is None else rates.bound(cost, operands),
    }


def sign(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the hash of all else that it says."""
    plain = json.loads(json.dumps({k: v for k, v in record.items() if k != "sha256"}))
    return {**plain, "sha256": _digest(plain)}


def read_record(text: str | bytes) -> dict[str, Any]:
    """A record that says what it said when it was made.

    Raises UserError: it is no such record, or was changed.
    """
    try:
        record = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UserError("the file is not a JSON record", hint=str(error)) from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise UserError("the file is not a record of metainfer verify")
    if record.get("version") != RECORD_VERSION:
        raise UserError(
            f"the record has version {record.get('version')}, this one reads {RECORD_VERSION}"
        )
    if sign(record) != record:
        raise UserError(
            "the record was changed after it was made", hint="run metainfer verify again"
        )
    return record


def keep(record: Mapping[str, Any], cache: Path | None = None) -> Path:
    """Write the record where `passed` finds it. Raises OSError."""
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = cache / f"{key_of(record['card'])}-{record['sha256'][:12]}.json"
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return path


def passed(facts: Mapping[str, Any], cache: Path | None = None) -> Passed:
    """All that passed, at every size, with exactly this card and these versions; of several
    records the latest counts. A file that cannot be read, or was changed, counts for nothing."""
    records = []
    for path in (cache or default_cache()).glob(f"{key_of(facts)}-*.json"):
        with suppress(OSError, UserError):
            records.append(read_record(path.read_bytes()))
    good: dict[tuple[str, str, str], bool] = {}
    for record in sorted(records, key=lambda one: str(one.get("date"))):
        latest: dict[tuple[str, str, str], bool] = {}
        for case in record["cases"] if record["card"] == dict(facts) else ():
            name = case["op"], json.dumps(case["case"], sort_keys=True), case["backend"]
            latest[name] = latest.get(name, True) and not case["problem"]
        good |= latest
    return frozenset(name for name, fine in good.items() if fine)


def unverified(kernels: Iterable[Kernel], done: Passed) -> list[Kernel]:
    """Those kernels, each once, that never passed."""
    left: dict[tuple[str, str, str], Kernel] = {}
    for kernel in kernels:
        case = json.dumps(json.loads(json.dumps(asdict(kernel.case))), sort_keys=True)
        if (kernel.op, case, kernel.backend) not in done:
            left[kernel.op, case, kernel.backend] = kernel
    return list(left.values())


def key_of(facts: Mapping[str, Any]) -> str:
    """Names the files of a card and its versions."""
    return _digest(dict(facts))[:16]


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
