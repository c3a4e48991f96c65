"""Which operations `bench ops` measures, at which sizes."""

from __future__ import annotations

from metainfer.bench.ops import OpWork, selected
from metainfer.bench.ops_settings import OpsLoad
from metainfer.ops.base import Load
from metainfer.ops.use import DECODE, PREFILL
from metainfer.ops.uses import uses_of, usual_activations
from metainfer.shipped import SHIPPED_MODEL

_PREFILL_ROWS = {"cuda": 8192, "cpu": 256}
_CONTEXT = {"cuda": 32768, "cpu": 2048}


def works_of(load: OpsLoad, device: str) -> list[OpWork]:
    """All cases of the models as layers bind them on the device, prefill first."""
    rows = load.prefill_rows or _PREFILL_ROWS[device]
    context = load.context or max(rows, _CONTEXT[device])
    sizes = {PREFILL: (rows,), DECODE: load.decode_batches}
    return [
        OpWork(model, ranks, use.op, use.case, phase, Load(batch, context), use.times, use.served)
        for model in load.models or (SHIPPED_MODEL,)
        for ranks in load.tensor_parallel_sizes
        for use in uses_of(
            model, ranks, load.part or "", activations=usual_activations(model, device)
        )
        if selected(use, load)
        for phase in use.phases
        for batch in sizes[phase]
    ]
