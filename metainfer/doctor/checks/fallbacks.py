"""Fallbacks by what they cost: which slow path to mend first.

Of vLLM and SGLang as they come by the cost model, against kernels and exchanges made for the card;
of this engine by what its own records of coverage say was passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from metainfer.arch.shapes import ModelShape
from metainfer.doctor.estimate import predicted, tensor_layouts, tensor_sizes, workload_of
from metainfer.doctor.finding import Check, Finding, Level, Patient
from metainfer.hardware.facts import Unknown
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.ops.kernel_order import NO_KERNEL
from metainfer.plan.cost.constants import read_constants
from metainfer.plan.cost.parts import ATTENTION, EXPERTS, HEAD, INDEXER, PRODUCTS, SMALL, STREAMS
from metainfer.plan.cost.phases import HOST, TRANSFERS
from metainfer.plan.cost.predict import Prediction
from metainfer.plan.cost.rates import Rates
from metainfer.plan.layouts import Formats
from metainfer.plan.ledger_ranks import RankLedgers

_SLOW = "cost of slow paths"
_MISSING = "cost of a missing kernel"
_OWN = "cost of kernels passed over"

_MADE_FOR_IT, _COMPOSED = "metainfer", "fallback"
"""Profiles of the cost model: kernels and exchanges for the card; torch's operations in place of
attention and indexer."""
_WORTH_IT = 0.1
"""Of a prompt's time."""
_SHOWN = 4

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        TRANSFERS: "exchanges between cards",
        STREAMS: "hyper-connections",
        SMALL: "norms and rounding",
        EXPERTS: "routed experts",
        ATTENTION: "sparse attention",
        INDEXER: "the indexer",
        PRODUCTS: "products with weights",
        HEAD: "the head",
        HOST: "the host between launches",
    }
)
_FIXES: Mapping[str, str] = MappingProxyType(
    {
        TRANSFERS: "follow the findings on NCCL and exchanges, and let `metainfer plan MODEL"
        " --engine stock` choose a layout that exchanges less",
        STREAMS: "fused kernels of hyper-connections: an engine that has them for this card (B12X"
        " on sm_120, this engine everywhere)",
        SMALL: "norms and rounding fused into one kernel each, decode in full CUDA graphs: do not"
        " start with --enforce-eager, and read the log with `metainfer doctor --log` for a graph"
        " mode that was lowered",
        EXPERTS: "compare the backends of experts (Marlin, Triton, CUTLASS) with your prompts: the"
        " one chosen by default is not always the fastest",
        ATTENTION: "read the log with `metainfer doctor --log`: it says which path attention took;"
        " a compiled sparse kernel, not Triton or TileLang",
        INDEXER: "the indexer's scores in one kernel that writes the selected keys alone",
    }
)


@dataclass(frozen=True, slots=True)
class Loss:
    """What one kind of work takes as engines come, and made for the card, in seconds of a prompt
    token or a decode step."""

    group: str
    taken_s: float
    best_s: float

    @property
    def lost_s(self) -> float:
        return self.taken_s - self.best_s


def slow_paths(patient: Patient) -> Iterator[Finding]:
    """With all cards in one group, as most people start an engine."""
    shape, machine = patient.shape, patient.machine
    found = None if shape is None else _widest(shape, machine)
    if shape is None or found is None:
        return
    ranks, as_it_comes = found
    best = predicted(shape, machine, ranks, read_constants().profile(_MADE_FOR_IT))
    if best is None:
        return
    prompt = _losses(as_it_comes.prefill.by_group(), best.prefill.by_group())
    decode = _losses(as_it_comes.decode.by_group(), best.decode.by_group())
    whole_s = as_it_comes.prefill.seconds
    evidence = (
        "a prompt token, us lost of us taken: "
        + ", ".join(_told(one, 1e6) for one in prompt[:_SHOWN])
        + "; a decode step, ms: "
        + ", ".join(_told(one, 1e3) for one in decode[:_SHOWN])
    )
    if not prompt or prompt[0].lost_s < _WORTH_IT * whole_s:
        yield Finding(_SLOW, Level.OK, "no slow path costs a tenth of a prompt", evidence)
        return
    first = prompt[0]
    error = max(as_it_comes.input_error, best.input_error)
    yield Finding(
        _SLOW,
        Level.WARN,
        f"of what vLLM and SGLang as they come leave unused with TP{ranks}, {_NAMES[first.group]}"
        f" cost most: {first.lost_s / whole_s:.0%} of prefill",
        evidence,
        f"{as_it_comes.input_per_s:,.0f} input tok/s as it comes; mended alone, "
        + ", ".join(
            f"{_NAMES[one.group]} {as_it_comes.input_per_s * whole_s / (whole_s - one.lost_s):,.0f}"
            for one in prompt[:_SHOWN]
        )
        + f"; all of them {as_it_comes.input_per_s * whole_s / (whole_s - _lost_s(prompt)):,.0f},"
        f" and {(as_it_comes.tpot_s - _lost_s(decode)) * 1e3:.1f} in place of"
        f" {as_it_comes.tpot_s * 1e3:.1f} ms between tokens (estimates, off by up to {error:.0%})",
        _FIXES.get(first.group, ""),
        "cost model of `metainfer plan`: rates of engines as they come are calibrated on published"
        " figures",
    )


def missing(patient: Patient) -> Iterator[Finding]:
    """What it would cost if no kernel took the shape, and torch composed it."""
    shape, machine = patient.shape, patient.machine
    found = None if shape is None else _widest(shape, machine)
    if shape is None or found is None:
        return
    ranks, as_it_comes = found
    composed = predicted(shape, machine, ranks, read_constants().profile(_COMPOSED))
    if composed is None:
        return
    groups = composed.prefill.by_group()
    usual = as_it_comes.prefill.by_group()
    worse = sorted(
        (group for group in (ATTENTION, INDEXER) if groups.get(group, 0.0) > usual.get(group, 0.0)),
        key=lambda group: usual.get(group, 0.0) - groups[group],
    )
    if not worse:
        return
    told = "; ".join(
        f"{_NAMES[group]} {groups[group] * 1e6:,.0f} in place of {usual.get(group, 0.0) * 1e6:,.1f}"
        " us a prompt token"
        for group in worse
    )
    first = worse[0]
    alone_s = as_it_comes.prefill.seconds - usual.get(first, 0.0) + groups[first]
    left = as_it_comes.prefill.seconds / alone_s
    yield Finding(
        _MISSING,
        Level.OK,
        f"without a kernel {_NAMES[first]} leaves {left:.0%} of"
        f" {as_it_comes.input_per_s:,.0f} input tok/s",
        f"TP{ranks}, composed of torch's operations: {told}; a decode step without"
        f" graphs {composed.tpot_s * 1e3:,.0f} in place of"
        f" {as_it_comes.tpot_s * 1e3:,.1f} ms",
        fix="`metainfer doctor --log FILE` says whether your engine took that way",
        source="cost model of `metainfer plan`, calibrated on a published report",
    )


def passed_over(patient: Patient) -> Iterator[Finding]:
    """Of this engine: operations whose first choice does not take the card or the shape, by the
    time that they take at least."""
    known = patient.coverage
    if not known or isinstance(known, Unknown):
        return
    constants = read_constants()
    rates = Rates(patient.machine, constants, constants.profile(_MADE_FOR_IT))
    if rates.problem:
        return
    ranks, report = next(iter(known.items()))
    sums: dict[tuple[str, str], float] = {}
    why: dict[tuple[str, str], str] = {}
    served = any(row["served"] for row in report["rows"])
    for row in report["rows"]:
        reason = _passed(row)
        if reason and "least" in row and row["served"] == served:
            key = row["phase"], row["op"]
            sums[key] = sums.get(key, 0.0) + row["times"] * floor_s(row["least"], rates)
            why[key] = reason
    if not sums:
        return
    ordered = sorted(sums, key=lambda key: (key[0] == "decode", -sums[key]))
    told = [
        f"{phase} {op}: {sums[phase, op] * 1e3:.2f} ms ({why[phase, op]})" for phase, op in ordered
    ]
    phase, op = ordered[0]
    yield Finding(
        _OWN,
        Level.OK,
        f"{op} takes {sums[phase, op] * 1e3:.1f} ms of a"
        f" {'decode step' if phase == 'decode' else 'chunk'} at least",
        f"TP{ranks}, at least, of a chunk of 2,048 rows and a decode step of 16, at the rates of"
        " the card: " + "; ".join(told[: 2 * _SHOWN]),
        fix="`metainfer bench ops` on the card measures what they take",
    )


def floor_s(least: Mapping[str, Any], rates: Rates) -> float:
    """The longer of a call's bytes and operations, at what the card reaches."""
    form = "fp8" if least["operands"] == "fp8" else "bf16"
    product = rates.of(f"product {form}", least["rows"]).per_s
    return float(max(least["bytes"] / rates.memory().per_s, least["flops"] / product))


def _passed(row: Mapping[str, Any]) -> str:
    """Why the first choice does not serve; "" where it does."""
    if not row["ok"]:
        return "; ".join(row["problems"])
    reasons = [r for r in row["refused"] if r["reason"] != NO_KERNEL]
    return f"{row['backend']} serves; {reasons[0]['backend']} {reasons[0]['reason']}" if (
        reasons
    ) else ""  # fmt: skip


def _widest(shape: ModelShape, machine: Machine) -> tuple[int, Prediction] | None:
    """Ranks of the widest tensor parallelism that holds the model, and what it does."""
    gpus, ledgers = len(gpus_of(machine)), RankLedgers()
    for size in reversed(tensor_sizes(shape, gpus)):
        layouts = tensor_layouts(size, gpus)
        if ledgers(shape, machine, layouts, workload_of(shape), Formats()).fits:
            found = predicted(shape, machine, size)
            return None if found is None else (size, found)
    return None


def _losses(taken: Mapping[str, float], best: Mapping[str, float]) -> list[Loss]:
    """The dearest first."""
    found = [Loss(group, taken[group], best.get(group, 0.0)) for group in taken if group in _NAMES]
    return sorted((one for one in found if one.lost_s > 0), key=lambda one: -one.lost_s)


def _lost_s(losses: Sequence[Loss]) -> float:
    return sum(one.lost_s for one in losses)


def _told(loss: Loss, scale: float) -> str:
    return f"{_NAMES[loss.group]} {loss.lost_s * scale:.1f} of {loss.taken_s * scale:.1f}"


CHECKS = (
    Check(_SLOW, "Which slow path of engines as they come costs most?", slow_paths),
    Check(_MISSING, "What would it cost if attention had no kernel?", missing),
    Check(
        _OWN, "Which kernels of this engine are passed over, and how much is there?", passed_over
    ),
)
