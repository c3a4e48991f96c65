"""What the kernels reach on one GPU: products, experts, attention, the indexer, plain copies.

Each is an operation at the shapes of a model that people run; its count of operations over the
median time of a series of different inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from metainfer.comm.measure_worker import Refused
from metainfer.core.errors import UserError
from metainfer.hardware.curves import MEASURED_HERE, Rate
from metainfer.kernels.inputs.series import draw_series
from metainfer.kernels.platform import Platform, platform
from metainfer.kernels.processes import Numbered, in_processes, require_a_sound_device
from metainfer.kernels.timing import Stopwatch
from metainfer.kernels.timing import measure_rates as plain_rates
from metainfer.kernels.verify import prepared
from metainfer.ops.attention import AttentionCase
from metainfer.ops.base import Load
from metainfer.ops.catalogue import OPS
from metainfer.ops.index import IndexCase
from metainfer.ops.linear import DenseCase, Fp8RowsCase
from metainfer.ops.moe import ExpertsFp8RowsCase

_COPY = "copy"
_MOST_SERIES = 4
_TIMING_S = 0.05
_LONGEST_PIECE_S = 60.0
_CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class RateWork:
    """Attributes:
    work, rows: as of `Rate`; of experts, rows of each.
    op, case, load: the operation; "" for plain copies.
    """

    work: str
    rows: int
    op: str = ""
    case: Any = None
    load: Load = field(default_factory=lambda: Load(1))


def _works() -> tuple[RateWork, ...]:
    """Large calls, which plans count with, first."""
    fp8 = Fp8RowsCase(4096, 8192)
    dense = DenseCase(4096, 4096, out_dtype="float32")
    experts = ExpertsFp8RowsCase(256, 6, 4096, 2048, 10.0)
    attention = AttentionCase(64, 512, 128, 4, 512)
    found = [RateWork(_COPY, 0)]
    for rows in (8192, 2048, 512, 16):
        found.append(RateWork("product fp8", rows, "linear.fp8_rows", fp8, Load(rows)))
    for tokens in (32768, 8192, 1024):
        rows = tokens * experts.selected // experts.experts
        load = Load(tokens)
        found.append(RateWork("experts fp4", rows, "moe.experts_fp8_rows", experts, load))
    for rows in (8192, 2048):
        found.append(
            RateWork("attention bf16", rows, "attention.sparse_prefill", attention,
                     Load(rows, _CONTEXT))
        )  # fmt: skip
    found.append(
        RateWork("attention bf16", 32, "attention.sparse_decode", attention, Load(32, _CONTEXT))
    )
    for form, work in (("index_fp8", "index fp8"), ("dense", "index bf16")):
        index = IndexCase(64, 128, 512, 4, key_format=form)
        found.append(RateWork(work, 8192, "attention.index_topk", index, Load(8192, _CONTEXT)))
    for rows in (8192, 512, 16):
        found.append(RateWork("product bf16", rows, "linear.dense", dense, Load(rows)))
    return tuple(found)


RATE_WORKS = _works()


def measure_rates(
    works: Sequence[RateWork], device: str, until_s: float, on_progress: Callable[[int, int], None]
) -> tuple[tuple[Rate, ...], list[str]]:
    """Rates in the order of `works`, and in sentences what was not measured; does not raise.

    Args:
        device: "cuda" or "cpu".
        until_s: of the monotonic clock: what is not done then is left.
    """
    found: dict[int, Rate] = {}
    why: dict[int, str] = {}

    def measured(number: int, result: Rate | Refused) -> None:
        if isinstance(result, Refused):
            why[number] = result.why
        else:
            found[number] = result
        on_progress(len(found) + len(why), len(works))

    def failed(number: int, reason: str) -> None:
        measured(number, Refused(reason))

    pieces = list(enumerate(works))
    in_processes(_measure, device, [pieces], measured, failed, until_s, _LONGEST_PIECE_S)
    notes = [f"{_name(works[number])}: {reason}" for number, reason in why.items()]
    late = [_name(work) for n, work in pieces if n not in found and n not in why]
    if late:
        notes.append(f"{', '.join(late)}: not reached in the time for rates")
    return tuple(found[number] for number in sorted(found)), notes


def _name(work: RateWork) -> str:
    return f"{work.work}, {work.rows} rows" if work.rows else work.work


def _measure(connection: Connection, device: str, works: Sequence[Numbered]) -> None:
    """In a process of its own: a kernel that crashes costs its own rate alone."""
    try:
        here = platform(device)
    except UserError as error:
        for number, _ in works:
            connection.send((number, Refused(error.message)))
        return
    for number, work in works:
        connection.send((number, _rate(here, work)))
        require_a_sound_device(here.device)


def _rate(here: Platform, work: RateWork) -> Rate | Refused:
    watch = Stopwatch(here.device)
    if work.work == _COPY:
        copied = plain_rates(here.device).bytes_per_s
        return Rate(_COPY, 0, copied, f"{MEASURED_HERE}: bytes read and written")
    try:
        backend = here.registry.bind(work.op, work.case, here.target).backend
        calls = draw_series(work.op, work.case, work.load, here.device, 0, _MOST_SERIES)
        timed = [prepared(here, work.op, backend, work.case, call) for call in calls]
        seconds = watch.median_s(timed, _TIMING_S)
    except Exception as error:  # whatever a kernel raises
        said = (str(error).splitlines() or [""])[0][:160]
        return Refused(f"{type(error).__name__}: {said}")
    flops = OPS[work.op].cost(work.case, work.load).flops
    return Rate(work.work, work.rows, flops / seconds, f"{MEASURED_HERE}: {work.op}, {backend}")
