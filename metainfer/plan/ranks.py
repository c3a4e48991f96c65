"""Ranks: how many share a model, on which devices, and what carries their collectives."""

from __future__ import annotations

from metainfer.arch.record import Arch
from metainfer.arch.split import check_split
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Gpu, Machine, gpus_of
from metainfer.ops.base import Target
from metainfer.plan.plan import Origin, Value
from metainfer.plan.settings import EngineSettings

NONE, GLOO, HOST_MEMORY, NCCL = "none", "gloo", "host memory", "nccl"
"""What carries collectives; NONE: there are none."""

CAPTURABLE = frozenset({NONE, NCCL})
"""Whose collectives may stand in a CUDA graph: they run on the GPU's stream, and no host waits."""


def stage_ranks(settings: EngineSettings) -> int:
    """Ranks of one stage."""
    return settings.tensor_parallel_size or 1


def rank_count(settings: EngineSettings) -> int:
    """Of all stages."""
    return stage_ranks(settings) * (settings.pipeline_parallel_size or 1)


def expert_parts(settings: EngineSettings) -> int:
    """Parts of a stage's ranks over which experts are dealt."""
    if settings.enable_expert_parallel:
        return stage_ranks(settings)
    return settings.expert_parallel_size or 1


def tensor_parallel_size(arch: Arch, settings: EngineSettings) -> Value[int]:
    """Raises UserError where so many ranks cannot divide the model."""
    given = settings.tensor_parallel_size
    if given is None:
        return Value(1, Origin.DEFAULT, "one rank unless more are asked for")
    check_split(arch, given, expert_parts(settings))
    return Value(given, Origin.FLAG, "given with --tensor-parallel-size")


def expert_parallel_size(settings: EngineSettings) -> Value[int]:
    """Raises UserError where two flags contradict each other; `check_split` does where it does not
    divide the ranks."""
    name, given = "--expert-parallel-size", settings.expert_parallel_size
    ranks = stage_ranks(settings)
    if settings.enable_expert_parallel:
        if given not in (None, ranks):
            raise UserError(
                f"--enable-expert-parallel deals experts over all {ranks} ranks of a stage, and"
                f" {name} {given} over {given} parts",
                hint="leave one of them out",
            )
        return Value(ranks, Origin.FLAG, "given with --enable-expert-parallel")
    if given is None:
        return Value(1, Origin.DEFAULT, "every rank has a slice of every expert")
    return Value(given, Origin.FLAG, f"given with {name}")


def pipeline_parallel_size(arch: Arch, settings: EngineSettings) -> Value[int]:
    """Raises UserError where there are fewer layers than stages."""
    name, given = "--pipeline-parallel-size", settings.pipeline_parallel_size
    if given is None:
        return Value(1, Origin.DEFAULT, "one stage has all layers")
    if given > arch.num_layers:
        raise UserError(
            f"{name} {given} asks for more stages than the {arch.num_layers} layers of {arch.name}",
            hint=f"give at most {arch.num_layers}",
        )
    return Value(given, Origin.FLAG, f"given with {name}")


def prefill_context_parallel_size(settings: EngineSettings) -> Value[int]:
    """Raises UserError where it does not divide the ranks."""
    name, given = "--prefill-context-parallel-size", settings.prefill_context_parallel_size
    if given is None:
        return Value(1, Origin.DEFAULT, "every rank computes all rows, with its share of heads")
    ranks = stage_ranks(settings)
    if ranks % given:
        raise UserError(
            f"{name} {given} does not divide the {ranks} ranks of --tensor-parallel-size",
            hint=f"give a divisor of {ranks}, or leave it out",
        )
    return Value(given, Origin.FLAG, f"given with {name}")


def decode_context_parallel_size(arch: Arch, settings: EngineSettings) -> Value[int]:
    """Raises UserError where it does not divide the ranks, or there is nothing to divide."""
    name, given = "--decode-context-parallel-size", settings.decode_context_parallel_size
    if given is None:
        return Value(1, Origin.DEFAULT, "every rank keeps the whole caches of its sequences")
    ranks = stage_ranks(settings)
    if ranks % given:
        raise UserError(
            f"{name} {given} does not divide the {ranks} ranks of --tensor-parallel-size",
            hint=f"give a divisor of {ranks}, or leave it out",
        )
    if given > 1 and not any(layer.ratio for layer in arch.layers):
        raise UserError(
            f"{name} {given}: no cache of {arch.name} grows with the tokens, so there is nothing to"
            " divide",
            hint="leave it out",
        )
    return Value(given, Origin.FLAG, f"given with {name}")


def collectives(target: Target, ranks: int) -> Value[str]:
    """What carries the collectives of ranks of one host."""
    if ranks == 1:
        return Value(NONE, Origin.DEFAULT, "one rank has nobody to talk to")
    if target.type == "cuda":
        return Value(NCCL, Origin.DEFAULT, "runs on the GPU's own stream, inside of graphs too")
    return Value(HOST_MEMORY, Origin.DEFAULT, "processes of one host read each other's sums there")


def rank_gpus(machine: Machine, first: int, ranks: int) -> tuple[Gpu, ...]:
    """The GPUs of all ranks: rank r has the machine's GPU `first` + r.

    Raises UserError where there are too few, or where they run different code.
    """
    gpus = gpus_of(machine)
    chosen = gpus[first : first + ranks]
    if ranks > 1 and len(chosen) < ranks:
        after = "" if first == 0 else f" from cuda:{first} on"
        raise UserError(
            f"a model on {ranks} ranks asks for {ranks} GPUs, and there are {len(chosen)}{after}",
            hint="give fewer ranks, or --device cpu to run them all on the processor",
        )
    odd = next((gpu for gpu in chosen if gpu.capability != chosen[0].capability), None)
    if odd is not None:
        raise UserError(
            f"{chosen[0].name} and {odd.name} would share a model, and their code differs",
            hint="choose GPUs of one kind with --device",
        )
    return chosen


def refuse_code_of_others(settings: EngineSettings) -> None:
    """Code of another card is tried on one GPU."""
    if rank_count(settings) > 1 and settings.code_for is not None:
        raise UserError(
            f"--as {settings.code_for} tries another card's code on one GPU, and"
            f" {rank_count(settings)} ranks are asked for",
            hint="leave one of them out",
        )


def threads_of_rank(threads: Value[int], ranks: int) -> Value[int]:
    """Threads of a step, divided over the ranks of one host."""
    if ranks == 1 or threads.value == 0:
        return threads
    each = max(1, threads.value // ranks)
    return Value(each, threads.origin, f"{threads.reason}; {threads.value} over {ranks} ranks")
