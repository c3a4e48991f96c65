"""Group: how the ranks of a plan share the work, and how they talk."""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.arch.record import Arch
from metainfer.hardware.machine import Machine
from metainfer.ops.base import Target
from metainfer.plan.plan import Value
from metainfer.plan.ranks import (
    collectives,
    decode_context_parallel_size,
    expert_parallel_size,
    pipeline_parallel_size,
    prefill_context_parallel_size,
    rank_count,
    tensor_parallel_size,
    threads_of_rank,
)
from metainfer.plan.settings import EngineSettings
from metainfer.plan.ways import collective_ways
from metainfer.plan.wire_proof import WireProof, wire_dtype


@dataclass(frozen=True, slots=True)
class Group:
    """Values of a plan, of the same names there but for the endings.

    Attributes:
        threads: of each rank.
    """

    tensor: Value[int]
    prefill_context: Value[int]
    decode_context: Value[int]
    expert: Value[int]
    pipeline: Value[int]
    collectives: Value[str]
    wire_dtype: Value[str]
    threads: Value[int]

    def ways(self, machine: Machine, gpu: int) -> Value[str]:
        """The ways that collectives take. `gpu`: of the first rank."""
        carried, wire = self.collectives.value, self.wire_dtype.value
        return collective_ways(machine, carried, self.tensor.value, self.threads.value, wire, gpu)


def choose_group(
    arch: Arch,
    settings: EngineSettings,
    target: Target,
    threads: Value[int],
    wire_proof: WireProof | None,
) -> Group:
    """`threads`: of all ranks together. Raises UserError for a size that the model, the device or
    another size rules out."""
    tensor = tensor_parallel_size(arch, settings)
    everyone = rank_count(settings)
    return Group(
        tensor=tensor,
        prefill_context=prefill_context_parallel_size(settings),
        decode_context=decode_context_parallel_size(arch, settings),
        expert=expert_parallel_size(settings),
        pipeline=pipeline_parallel_size(arch, settings),
        collectives=collectives(target, everyone),
        wire_dtype=wire_dtype(arch, settings, tensor.value, wire_proof),
        threads=threads_of_rank(threads, everyone),
    )
