"""Matrix: what of a model and of layouts this engine does today, refuses, ignores, or plans.

A row here changes when the engine does; tests hold rows against what the plan refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from metainfer.arch.shapes import ModelShape
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.plan.layout_flags import has_flag

TENSOR_PARALLEL = "tensor parallel (TP)"


class State(StrEnum):
    WORKS = "works"
    REFUSED = "refused"
    NO_EFFECT = "no effect"
    PLANNED = "planned"


@dataclass(frozen=True, slots=True)
class Cell:
    """One feature with one model.

    Attributes:
        feature: in words. flag: how it is asked for; "" where nothing asks.
        why: a sentence without its full stop.
    """

    feature: str
    flag: str
    state: State
    why: str


def matrix(shape: ModelShape, machine: Machine) -> tuple[Cell, ...]:
    """All features, in a fixed order."""
    return tuple(Cell(name, flag, *judge(shape, machine)) for name, flag, judge in _FEATURES)


_Verdict = tuple[State, str]
_Judge = Callable[[ModelShape, Machine], _Verdict]


def _served(shape: ModelShape, machine: Machine) -> _Verdict:
    if shape.arch is None:
        return (
            State.PLANNED,
            f"models of {_family(shape)} are not served yet: config, kernels of attention and"
            " plans are here; `serve` refuses it by name",
        )
    return State.WORKS, "on a CPU or on one GPU that holds it whole, or over ranks"


def _needs_serving(judge: _Judge) -> _Judge:
    """What cannot be said of a model that is not served."""

    def judged(shape: ModelShape, machine: Machine) -> _Verdict:
        if shape.arch is None:
            return State.REFUSED, "the model itself is not served yet"
        return judge(shape, machine)

    return judged


def _one_of_many(shape: ModelShape, machine: Machine) -> _Verdict:
    return State.WORKS, "--device cuda:1 takes one of several GPUs"


def _several_ranks(shape: ModelShape, machine: Machine) -> _Verdict:
    if not shape.arch:
        return State.PLANNED, "the model itself is not served yet"
    return State.WORKS, "a process for each rank; on GPUs it has not run yet"


def _expert(shape: ModelShape, machine: Machine) -> _Verdict:
    if not shape.experts:
        return State.NO_EFFECT, "the model has no routed experts"
    return _several_ranks(shape, machine)


def _shards(shape: ModelShape, machine: Machine) -> _Verdict:
    if not shape.side.owners():
        return State.NO_EFFECT, "the model keeps no entries that could be divided"
    if not has_flag("decode_context_parallel_size"):
        return State.PLANNED, "no flag asks for it yet; plans are made with it (`metainfer plan`)"
    return _several_ranks(shape, machine)


def _replicas(shape: ModelShape, machine: Machine) -> _Verdict:
    if len(gpus_of(machine)) < 2:
        return State.NO_EFFECT, "there are no two GPUs"
    return (
        State.REFUSED,
        "start a server for each replica with --device cuda:N and a port of its own",
    )


def _speculation(shape: ModelShape, machine: Machine) -> _Verdict:
    if shape.draft is None:
        return State.REFUSED, "the checkpoint has no drafting blocks, and no drafting is here"
    return (
        State.PLANNED,
        "drafting blocks of the checkpoint are recognised and left out; flags are refused by name",
    )


def _prefixes(shape: ModelShape, machine: Machine) -> _Verdict:
    return State.PLANNED, "prefixes are not reused yet; the flag is refused by name"


def _bytes_of_latents(shape: ModelShape, machine: Machine) -> _Verdict:
    return State.WORKS, "--kv-cache-dtype fp8; `bench quality` says whether this model minds"


def _index_keys(shape: ModelShape, machine: Machine) -> _Verdict:
    if not shape.side.choosers():
        return State.NO_EFFECT, "the model has no indexer"
    if "index_fp4" not in shape.side.indexer.key_formats:
        return State.REFUSED, "the model's index keys have no such form"
    return State.WORKS, "--index-cache-dtype fp4"


def _adapters(shape: ModelShape, machine: Machine) -> _Verdict:
    return State.REFUSED, "adapters are not supported: merge them into the weights beforehand"


def _vision(shape: ModelShape, machine: Machine) -> _Verdict:
    if shape.vision is None:
        return State.NO_EFFECT, "the model has no image tower"
    return State.REFUSED, "the image tower is not loaded; text alone"


def _graphs(shape: ModelShape, machine: Machine) -> _Verdict:
    if not gpus_of(machine):
        return State.NO_EFFECT, "a CPU has no CUDA graphs"
    return State.WORKS, "decode steps are captured; --enforce-eager switches it off"


def _chunks(shape: ModelShape, machine: Machine) -> _Verdict:
    return State.WORKS, "always, --max-num-batched-tokens rows at a time"


def _offload(shape: ModelShape, machine: Machine) -> _Verdict:
    return State.REFUSED, "weights stay on one device"


_FEATURES: tuple[tuple[str, str, _Judge], ...] = (
    ("serving", "metainfer serve MODEL", _served),
    ("one of several GPUs", "--device cuda:N", _needs_serving(_one_of_many)),
    (TENSOR_PARALLEL, "--tensor-parallel-size", _several_ranks),
    ("expert parallel (EP)", "--enable-expert-parallel", _expert),
    ("pipeline parallel (PP)", "--pipeline-parallel-size", _several_ranks),
    ("context parallel prefill (CP)", "--prefill-context-parallel-size", _several_ranks),
    ("decode context parallel (DCP)", "--decode-context-parallel-size", _shards),
    ("replicas", "--data-parallel-size", _replicas),
    ("speculation", "--speculative-config", _speculation),
    ("prefix reuse", "--enable-prefix-caching", _prefixes),
    ("chunked prefill", "", _needs_serving(_chunks)),
    ("CUDA graphs", "--cuda-graph-sizes", _needs_serving(_graphs)),
    ("fp8 caches", "--kv-cache-dtype fp8", _needs_serving(_bytes_of_latents)),
    ("fp4 index keys", "--index-cache-dtype fp4", _needs_serving(_index_keys)),
    ("adapters (LoRA)", "--enable-lora", _adapters),
    ("images", "", _vision),
    ("weights in host memory", "--cpu-offload-gb", _offload),
)

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v41": "DeepSeek-V4.1",
        "deepseek_v32": "DeepSeek-V3.2",
        "glm_moe_dsa": "GLM-5",
    }
)


def _family(shape: ModelShape) -> str:
    return _NAMES.get(shape.side.family, shape.side.family)
