"""What records of verification that were kept say of kernels: passed, passed in part, or neither.

A kernel passed where every check of its case at the sizes that `metainfer verify` takes by itself
did; in part where some were not run, or were run at smaller sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from metainfer.core.errors import UserError
from metainfer.core.files import require_ours
from metainfer.kernels.registry import Kernel
from metainfer.kernels.verify_record import default_cache, key_of, read_record
from metainfer.kernels.verify_run import State
from metainfer.ops.base import case_fields
from metainfer.ops.kernel_order import REFERENCE

Name = tuple[str, str, str]  # (op, case as JSON, backend)


class Proof(StrEnum):
    """What a record proves of a kernel."""

    WHOLE = "whole"
    PARTIAL = "partial"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Known:
    """Kernels that passed, and those that passed in part alone."""

    passed: frozenset[Name]
    partly: frozenset[Name]


def known(facts: Mapping[str, Any], cache_dtype: str, cache: Path | None = None) -> Known:
    """What passed with exactly this card, these versions and this format of caches; of several
    records the latest counts, a partial one only for what nothing was known of. A file that cannot
    be read, or was changed, counts for nothing."""
    found: dict[Name, Proof] = {}
    for record in records(f"{key_of(facts)}-*.json", cache):
        if record["card"] == dict(facts) and record["cache_dtype"] == cache_dtype:
            add_proofs(found, record)
    return Known(
        frozenset(name for name, proof in found.items() if proof is Proof.WHOLE),
        frozenset(name for name, proof in found.items() if proof is Proof.PARTIAL),
    )


def records(pattern: str, cache: Path | None = None) -> list[dict[str, Any]]:
    """Those that were kept under such names, oldest first; none where others may write."""
    found = []
    folder = cache or default_cache()
    with suppress(OSError):
        require_ours(folder)
        for path in folder.glob(pattern):
            with suppress(OSError, UserError):
                found.append(read_record(path.read_bytes()))
    return sorted(found, key=lambda one: str(one.get("date")))


def add_proofs(found: dict[Name, Proof], record: Mapping[str, Any]) -> dict[Name, Proof]:
    """Adds what a record that is newer than all in `found` says of each kernel, and returns it."""
    cut = {_case_of(case) for case in record["cases"] if case["state"] == State.NOT_RUN}
    latest: dict[Name, Proof] = {}
    for case in record["cases"]:
        name = (*_case_of(case), case["backend"])
        if case["state"] == State.FAILED:
            latest[name] = Proof.FAILED
        elif case["state"] == State.PASSED:
            whole = record["whole_sizes"] and _case_of(case) not in cut
            latest.setdefault(name, Proof.WHOLE if whole else Proof.PARTIAL)
    for name, proof in latest.items():
        if proof is not Proof.PARTIAL or found.get(name) is not Proof.WHOLE:
            found[name] = proof
    return latest


def unverified(kernels: Iterable[Kernel], done: frozenset[Name]) -> dict[Name, Kernel]:
    """Those kernels, each once, that never passed. References are what others are held against."""
    left: dict[Name, Kernel] = {}
    for kernel in kernels:
        case = json.dumps(case_fields(kernel.case), sort_keys=True)
        for backend in kernel.backends:
            name = kernel.op, case, backend
            if backend != REFERENCE and name not in done:
                left[name] = kernel
    return left


def _case_of(case: Mapping[str, Any]) -> tuple[str, str]:
    return case["op"], json.dumps(case["case"], sort_keys=True)
