"""Estimates: what the cost model says of a machine as it is, and as it could be.

Of vLLM and SGLang as they come (the profile "stock"), for that is what people run on several cards
today. Where the record says too little there is no estimate.
"""

from __future__ import annotations

from dataclasses import replace

from metainfer.arch.shapes import ModelShape
from metainfer.doctor.finding import Patient
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.plan.candidates import refusal
from metainfer.plan.cost.constants import Constants, Profile, read_constants
from metainfer.plan.cost.phases import Phases
from metainfer.plan.cost.predict import Prediction, predict
from metainfer.plan.layouts import Formats, Layout, Layouts
from metainfer.plan.workload import Workload, workload_within

STOCK = "stock"
_SIZES = (1, 2, 4, 8, 16)


def workload_of(shape: ModelShape) -> Workload:
    """What estimates are for: prompts of 8,192 tokens, or half of what the model reads."""
    return workload_within(shape.side.max_model_len)


def tensor_layouts(tensor: int, gpus: int) -> Layouts:
    """Heads divided over `tensor` ranks, in as many replicas as there is room for."""
    one = Layout(replicas=gpus // tensor, tensor=tensor)
    return Layouts(one, one)


def tensor_sizes(shape: ModelShape, gpus: int, constants: Constants | None = None) -> list[int]:
    """Ranks of tensor parallelism that the model divides by and that there are cards for."""
    profile = (constants or read_constants()).profile(STOCK)
    sizes = [size for size in _SIZES if size <= gpus]
    return [size for size in sizes if not refusal(shape, tensor_layouts(size, gpus), profile)]


def predicted(
    shape: ModelShape, machine: Machine, tensor: int, profile: Profile | None = None
) -> Prediction | None:
    """Of tensor parallelism over `tensor` cards; None where the record says too little."""
    constants = read_constants()
    phases = Phases(shape, machine, constants, profile or constants.profile(STOCK))
    if phases.problem:
        return None
    return predict(
        phases, tensor_layouts(tensor, len(gpus_of(machine))), Formats(), workload_of(shape)
    )


def told(before: Prediction, after: Prediction, how: str) -> str:
    """Both rates in a sentence, with what they are worth."""
    error = max(before.input_error, after.input_error)
    return (
        f"estimated {before.input_per_s:,.0f} input tok/s as it is and {after.input_per_s:,.0f}"
        f" {how} (either may be off by {error:.0%})"
    )


def gain(patient: Patient, as_it_is: Machine, as_it_could_be: Machine, how: str) -> str:
    """What prefill over all cards gains where links or curves change; "" without a model or where
    the model cannot say, or sees no difference.

    Collectives that were recorded are left out on both sides, for they are of one state alone.
    """
    if patient.shape is None:
        return ""
    sizes = tensor_sizes(patient.shape, len(gpus_of(as_it_is)))
    if not sizes or sizes[-1] == 1:
        return ""
    stock = read_constants().profile(STOCK)
    # NCCL as it comes hardly feels a link; what uses the links does.
    tuned = replace(stock, collectives=("nccl", "staged", "nvlink"))
    before, after = (
        predicted(patient.shape, by_links(machine), sizes[-1], tuned)
        for machine in (as_it_is, as_it_could_be)
    )
    if before is None or after is None or after.input_per_s < 1.01 * before.input_per_s:
        return ""
    return (
        f"{patient.shape.name} with TP{sizes[-1]} reads at"
        f" {before.input_per_s / after.input_per_s:.0%} of the rate {how}, estimated from links"
        f" alone: {before.input_per_s:,.0f} of {after.input_per_s:,.0f} input tok/s with exchanges"
        " that use them"
    )


def by_links(machine: Machine) -> Machine:
    """Without curves: transfers follow from links."""
    return replace(machine, curves=())
