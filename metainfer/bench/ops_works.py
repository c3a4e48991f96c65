"""Which operations `bench ops` measures, at which sizes."""

from __future__ import annotations

from metainfer.bench.ops import OpWork, selected
from metainfer.bench.ops_settings import OpsLoad
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS
from metainfer.shipped import SHIPPED_MODEL

_PREFILL_ROWS = {"cuda": 8192, "cpu": 256}
_CONTEXT = {"cuda": 32768, "cpu": 2048}
# Operations of one phase alone; all others run in both.
_PREFILL = {"attention.compress", "attention.index_topk", "attention.sparse_prefill"}


def works_of(load: OpsLoad, device: str) -> list[OpWork]:
    """All cases of the models, prefill first."""
    found = []
    for model in load.models or (SHIPPED_MODEL,):
        for ranks in load.tensor_parallel_sizes:
            for op in OPS.values():
                for case in op.cases.get(model, ()) if selected(op.name, load) else ():
                    for phase, size in _loads(op.name, load, device):
                        found.append(OpWork(model, ranks, op.name, case, phase, size))
    return found


def _loads(op: str, load: OpsLoad, device: str) -> list[tuple[str, Load]]:
    rows = load.prefill_rows or _PREFILL_ROWS[device]
    context = load.context or max(rows, _CONTEXT[device])
    sizes = []
    if not op.endswith("decode"):
        sizes.append(("prefill", Load(rows, context)))
    if op not in _PREFILL:
        sizes += [("decode", Load(batch, context)) for batch in load.decode_batches]
    return sizes
