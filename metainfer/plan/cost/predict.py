"""Predictions: what a layout does with a workload, from the times of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from metainfer.core.errors import MetainferError
from metainfer.core.units import format_seconds
from metainfer.plan.cost.constants import INFERRED
from metainfer.plan.cost.phases import BUBBLES, Item, Phases, Step, averaged
from metainfer.plan.layouts import Formats, Layout, Layouts
from metainfer.plan.workload import Workload

OVERLOAD = "overload"
_NODES = ((0.1127, 5 / 18), (0.5, 8 / 18), (0.8873, 5 / 18))
"""Where three chunks of a long prompt stand for all, and their weights (Gauss)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Rates are of the whole machine, with no input in a prefix cache.

    Attributes:
        input_per_s: tokens of prompts a second while nothing decodes.
        ttft_s: from a prompt to its first token, with the wait behind others where requests arrive
            at a rate; infinite where more arrive than are answered, for then the queue grows.
        idle_ttft_s: likewise on an idle replica.
        tpot_s: between two tokens of a sequence, all of a replica's sequences at once.
        output_per_s: tokens a second while all requests decode.
        requests_per_s: answered, prompts and decoding one after the other.
        input_error, decode_error: one standard deviation as a share.
        prefill: time of one prompt token on a replica.
        decode: time of a decode step.
        load: share of what the replicas can answer that arrives; None without a rate.
    """

    input_per_s: float
    ttft_s: float
    idle_ttft_s: float
    tpot_s: float
    output_per_s: float
    requests_per_s: float
    input_error: float
    decode_error: float
    prefill: Step
    decode: Step
    load: float | None = None

    @property
    def ttft_told(self) -> str:
        return OVERLOAD if math.isinf(self.ttft_s) else format_seconds(self.ttft_s)

    @property
    def ttft_or_none(self) -> float | None:
        """For records, which have no infinite numbers: None under overload."""
        return None if math.isinf(self.ttft_s) else self.ttft_s


def wait_s(workload: Workload, replicas: int, prompt_s: float, load: float | None) -> float:
    """Of a prompt behind others, the mean: prompts of one length that arrive at random and are
    served one after the other by each replica (M/D/1); infinite from a load of 1 on."""
    if workload.request_rate_per_s is None or load is None:
        return 0.0
    if load >= 1.0:
        return math.inf
    used = workload.request_rate_per_s * prompt_s / replicas
    return prompt_s * used / (2.0 * (1.0 - used))


def predict(phases: Phases, layouts: Layouts, formats: Formats, workload: Workload) -> Prediction:
    """What to expect. Raises MetainferError where the machine's record says too little
    (`Phases.problem`)."""
    if phases.problem:
        raise MetainferError(phases.problem)
    layout = layouts.prefill
    each = max(1, math.ceil(workload.requests_at_once / layout.replicas))
    prefill, per_token_s, alone_s = _prefill(phases, layout, formats, workload, each)
    batch = math.ceil(workload.requests_at_once / layouts.decode.replicas)
    decode = phases.decode(layouts.decode, formats, batch, workload.mean_context)
    step_s = decode.seconds
    prompt_s = workload.input_tokens * per_token_s
    request_s = prompt_s + workload.output_tokens * step_s / batch
    busy = min(layout.replicas, workload.requests_at_once)
    load = None
    if workload.request_rate_per_s is not None:
        load = workload.request_rate_per_s * request_s / layout.replicas
    return Prediction(
        input_per_s=layout.replicas / per_token_s,
        ttft_s=alone_s + wait_s(workload, layout.replicas, prompt_s, load),
        idle_ttft_s=alone_s,
        tpot_s=step_s,
        output_per_s=min(workload.requests_at_once, batch * layouts.decode.replicas) / step_s,
        requests_per_s=busy / request_s,
        input_error=prefill.uncertainty(phases.constants),
        decode_error=decode.uncertainty(phases.constants),
        prefill=prefill,
        decode=decode,
        load=load,
    )


def _prefill(
    phases: Phases, layout: Layout, formats: Formats, workload: Workload, requests: int
) -> tuple[Step, float, float]:
    """Time of a prompt token by kind and in all, and of one prompt alone."""
    length, most = workload.input_tokens, formats.chunk_rows
    together = max(1, min(most // length, requests))
    rows = min(most, length) * together
    chunk = averaged(
        (weight, phases.chunk(layout, formats, rows, tokens, together))
        for tokens, weight in _places(length, most)
    )
    single = chunk
    if together > 1:
        single = phases.chunk(layout, formats, length, length, 1)
    stages, uneven = layout.pipeline, _unevenness(phases.shape.num_layers, layout.pipeline)
    chunks = math.ceil(length / most)
    # A stage hands its chunk on; with n chunks in flight, n + stages - 1 turns are taken.
    in_flight = math.ceil(chunks * requests / together)
    turn_s = chunk.seconds * uneven / stages
    taken = length / (chunks * min(most, length))  # the last chunk may be short
    whole_s = (in_flight + stages - 1) * turn_s * taken
    per_token_s = whole_s / (requests * length)
    alone_s = (chunks + stages - 1) * single.seconds * uneven / stages * taken
    # By kind: what a token's share of a turn is, and what waiting adds.
    scale = taken * in_flight / (requests * length) / stages
    items = [Item(i.group, i.seconds * scale, i.origin, i.why) for i in chunk.items]
    waiting = per_token_s - sum(item.seconds for item in items)
    if stages > 1:
        items.append(Item(BUBBLES, max(0.0, waiting), INFERRED, "stages that wait"))
    return Step(tuple(items)), per_token_s, alone_s


def _places(length: int, most: int) -> list[tuple[int, float]]:
    """(tokens that the last row of a chunk sees, weight) of chunks that stand for all."""
    chunks = math.ceil(length / most)
    if chunks <= len(_NODES):
        return [(min(length, most * (n + 1)), 1.0 / chunks) for n in range(chunks)]
    span = length - most
    return [(most + round(span * share), weight) for share, weight in _NODES]


def _unevenness(layers: int, stages: int) -> float:
    """Layers of the largest stage over the mean."""
    return math.ceil(layers / stages) / (layers / stages)
