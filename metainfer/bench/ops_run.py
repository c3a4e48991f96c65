"""One run of `bench ops`: rates first, then all operations, then the record."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from metainfer.bench.ops import OpWork, Side, backend_sides, measure
from metainfer.bench.ops_generic import generic_side
from metainfer.bench.ops_peers import find_peers
from metainfer.bench.ops_report import GENERIC, record
from metainfer.bench.ops_settings import OpsLoad
from metainfer.bench.ops_works import works_of
from metainfer.hardware.probe import probe
from metainfer.kernels.platform import Platform, platform
from metainfer.kernels.timing import measure_rates
from metainfer.kernels.verify import rates_of


def run_ops(
    load: OpsLoad, on_progress: Callable[[int, int], None], on_step: Callable[[str], None]
) -> dict[str, Any]:
    """Measure what `load` asks for; returns the record."""
    here = platform(load.device)
    older = platform(load.device, load.code_for) if load.code_for else None
    works = works_of(load, here.device)
    on_step(f"{len(works)} operations on {here.name}")
    rates = measure_rates(here.device)
    portable = None
    if older is not None:
        portable = str(load.code_for), rates_of(older)
    peers = find_peers(here.device)
    results = measure(
        load,
        works,
        lambda work: sides(work, load, here, older, peers.sides),
        here.device,
        on_progress,
    )
    return record(results, load, rates, portable, json.loads(probe().to_json()), peers.missing)


def sides(
    work: OpWork,
    load: OpsLoad,
    here: Platform,
    older: Platform | None,
    peers: Mapping[str, Callable[[OpWork], Side | None]],
) -> dict[str, Side | str]:
    """All that can do `work`: the kernels of this GPU first, which the others are compared with."""
    found: dict[str, Side | str] = dict(backend_sides(here, work))
    if older is not None:
        found |= {str(load.code_for): side for _, side in backend_sides(older, work)}
    for name, side_of in peers.items():
        side = side_of(work)
        if side is not None:
            found[name] = side
    if load.generic:
        generic = generic_side(work.op)
        if generic is not None:
            found[GENERIC] = generic
    return found
