"""Build: from Machine, Arch, settings and Capabilities to the Plan of an engine.

Flags win, then what was measured, then the model, then defaults. What contradicts itself or does
not fit is refused here, before anything is allocated, with the numbers and the flag to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from metainfer.arch.record import Arch
from metainfer.core.errors import UserError
from metainfer.core.units import format_bytes
from metainfer.hardware.machine import Machine, Unknown
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import cache_formats
from metainfer.ops.capabilities import Capabilities
from metainfer.ops.kernel_order import COMPOSED, REFERENCE
from metainfer.ops.uses import sampling_uses
from metainfer.ops.uses_v4 import served_uses
from metainfer.plan.caches import cache_dtypes
from metainfer.plan.devices import code_for, gpu_index, gpu_targets
from metainfer.plan.formats import Formats, choose_activations, choose_formats, expanding_backends
from metainfer.plan.graphs import graphs_switch
from metainfer.plan.group import Group, choose_group
from metainfer.plan.memory import Fixed, Sizes, fit_memory
from metainfer.plan.pace import async_scheduling, decode_share, longest_prefill_s
from metainfer.plan.plan import Origin, Plan, Value
from metainfer.plan.proof import CacheProof, too_short
from metainfer.plan.ranks import (
    expert_parts,
    rank_count,
    rank_gpus,
    refuse_code_of_others,
    stage_ranks,
)
from metainfer.plan.settings import EngineSettings, Residency
from metainfer.plan.streams import shared_expert_stream
from metainfer.plan.threads import threads_of
from metainfer.plan.tuning import Tuning, tuned_kernels
from metainfer.plan.wire_proof import WireProof

T = TypeVar("T")

CPU = Target("cpu")

DEFAULT_BATCHED_TOKENS = 2048
_BATCHED_TOKENS = Value(
    DEFAULT_BATCHED_TOKENS,
    Origin.DEFAULT,
    "rows enough for large matrix products, few enough that others do not wait long",
)
_QUEUED_REQUESTS = Value(1024, Origin.DEFAULT, "more would wait too long to be of use")


def choose_target(
    machine: Machine,
    arch: Arch,
    settings: EngineSettings,
    capabilities_of: Callable[[Target], Capabilities],
) -> Capabilities:
    """What the kernels can do on the device that the engine will use: the one asked for, else the
    first GPU on which every operation runs, else the CPU.

    Raises UserError if a GPU is asked for and there is none, or none that runs the code of --as.
    """
    on_gpus = [capabilities_of(target) for target in gpu_targets(machine, settings)]
    if settings.device == "cpu":
        return capabilities_of(CPU)
    served = _Served(arch, settings, None)
    usable = [able for able in on_gpus if not served.uncovered(able)]
    if settings.code_for is not None:
        return usable[0] if usable else on_gpus[0]
    if settings.device is not None:
        if not on_gpus:
            why = machine.gpus.why if isinstance(machine.gpus, Unknown) else "none is listed"
            raise UserError(
                f"--device {settings.device} asks for a GPU, and none is known here ({why})",
                hint="leave --device out to run on the CPU",
            )
        return usable[0] if usable else on_gpus[0]
    return usable[0] if usable else capabilities_of(CPU)


def build_plan(
    machine: Machine,
    arch: Arch,
    settings: EngineSettings,
    capabilities: Capabilities,
    proof: CacheProof | None = None,
    tuning: Tuning | None = None,
    wire_proof: WireProof | None = None,
) -> Plan:
    """The plan for `arch` on the device that `capabilities` are about.

    Args:
        proof: that the model may keep its caches as bytes.
        tuning: what is known of how fast kernels are on that device.
        wire_proof: that sums of its ranks may travel in 8 bits.

    Raises UserError for flags that contradict each other, the model or the machine, and for what
    does not fit into memory.
    """
    target = capabilities.target
    chosen = _choose(machine, arch, settings, capabilities, proof, wire_proof)
    fixed = chosen.fixed(arch, target, gpu_index(machine, settings, target))
    if target.type == "cuda":
        rank_gpus(machine, fixed.gpu, rank_count(settings))  # says where they are too few
    sizes = fit_memory(machine, arch, settings, fixed)
    _refuse_more_than_there_is(machine, settings, fixed, sizes)
    tuned = tuned_kernels(settings, tuning)
    plan = _plan(machine, settings, target, chosen, fixed.gpu, sizes, tuned)
    return _with_reach(plan, proof, wire_proof)


def _with_reach(plan: Plan, proof: CacheProof | None, wire_proof: WireProof | None) -> Plan:
    """Reasons that rest on verdicts say so where the plan's context is much longer."""

    def told(value: Value[str], found: CacheProof | WireProof | None) -> Value[str]:
        if found is None or found.reason != value.reason:
            return value
        said = too_short(found.longest, plan.max_model_len.value)
        return replace(value, reason=f"{value.reason}; {said}") if said else value

    return replace(
        plan,
        cache_dtype=told(plan.cache_dtype, proof),
        index_cache_dtype=told(plan.index_cache_dtype, proof),
        wire_dtype=told(plan.wire_dtype, wire_proof),
    )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is chosen before memory is shared out; names as in Plan."""

    device: Value[str]
    group: Group
    formats: Formats
    weights_residency: Value[str]
    kernel_order: Value[str]
    max_num_batched_tokens: Value[int]
    draft_rows: Value[int]
    cuda_graphs: Value[str]

    def fixed(self, arch: Arch, target: Target, gpu: int) -> Fixed:
        """What sizes in memory follow from."""
        group, formats = self.group, self.formats
        return Fixed(
            device_name=target.type,
            gpu=gpu,
            compute_dtype=formats.compute_dtype.value,
            caches=cache_formats(arch, formats.cache_dtype.value, formats.index_cache_dtype.value),
            residency=self.weights_residency.value,
            batched_tokens=self.max_num_batched_tokens.value,
            draft_rows=self.draft_rows.value,
            captures=self.cuda_graphs.value == "on",
            ranks=group.tensor.value,
            context=group.prefill_context.value,
            kv_shards=group.decode_context.value,
            expert=group.expert.value,
            stages=group.pipeline.value,
        )


def _choose(
    machine: Machine,
    arch: Arch,
    settings: EngineSettings,
    capabilities: Capabilities,
    proof: CacheProof | None,
    wire_proof: WireProof | None,
) -> _Chosen:
    target = capabilities.target
    served = _Served(arch, settings, proof)
    device = _device(machine, served, capabilities)
    _refuse_contradictions(arch, settings)
    group = choose_group(arch, settings, target, threads_of(machine, settings, target), wire_proof)
    formats = choose_formats(machine, arch, settings, capabilities, proof)
    residency, kernel_order = _residency(served, capabilities)
    return _Chosen(
        device,
        group,
        formats,
        residency,
        kernel_order,
        _flag("--max-num-batched-tokens", settings.max_num_batched_tokens) or _BATCHED_TOKENS,
        Value(0, Origin.DEFAULT, "speculation is off"),
        graphs_switch(target.type, settings, group.collectives.value),
    )


def _plan(
    machine: Machine,
    settings: EngineSettings,
    target: Target,
    chosen: _Chosen,
    gpu: int,
    sizes: Sizes,
    tuned: Value[str],
) -> Plan:
    """All of it in one record; what is left to choose takes no memory. `gpu`: of the first rank."""
    group, formats = chosen.group, chosen.formats
    return Plan(
        device=chosen.device,
        code_for=code_for(machine, settings, target),
        compute_dtype=formats.compute_dtype,
        activations=formats.activations,
        shared_expert_stream=shared_expert_stream(settings, target),
        cache_dtype=formats.cache_dtype,
        index_cache_dtype=formats.index_cache_dtype,
        tensor_parallel_size=group.tensor,
        prefill_context_parallel_size=group.prefill_context,
        decode_context_parallel_size=group.decode_context,
        expert_parallel_size=group.expert,
        pipeline_parallel_size=group.pipeline,
        collectives=group.collectives,
        collective_ways=group.ways(machine, gpu),
        wire_dtype=group.wire_dtype,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        max_queued_requests=_flag("--max-queued-requests", settings.max_queued_requests)
        or _QUEUED_REQUESTS,
        num_blocks=sizes.num_blocks,
        draft_rows=chosen.draft_rows,
        weights_residency=chosen.weights_residency,
        weights_bytes=sizes.weights_bytes,
        state_bytes=sizes.state_bytes,
        blocks_bytes=sizes.blocks_bytes,
        activation_bytes=sizes.activation_bytes,
        exchange_bytes=sizes.exchange_bytes,
        kernel_order=chosen.kernel_order,
        tuned_kernels=tuned,
        cuda_graphs=chosen.cuda_graphs,
        cuda_graph_sizes=sizes.graph_rows,
        cuda_graph_contexts=sizes.graph_contexts,
        graphs_bytes=sizes.graphs_bytes,
        async_scheduling=async_scheduling(target.type, settings),
        decode_share=decode_share(settings),
        longest_prefill_s=longest_prefill_s(settings),
        threads=group.threads,
    )


def _flag(name: str, given: T | None) -> Value[Any] | None:
    """The value of a flag that was given."""
    return None if given is None else Value(given, Origin.FLAG, f"given with {name}")


@dataclass(frozen=True, slots=True)
class _Served:
    """A model as it is asked for: what it runs follows from that and from the device."""

    arch: Arch
    settings: EngineSettings
    proof: CacheProof | None

    def ops(self, capabilities: Capabilities) -> tuple[str, ...]:
        """The operations that the model's layers and the sampler run."""
        arch = self.arch
        dtypes = cache_dtypes(self.settings, "bfloat16", self.proof)
        caches = cache_formats(arch, *(dtype.value for dtype in dtypes))
        activations = choose_activations(arch, self.settings, capabilities).value
        ranks, expert = stage_ranks(self.settings), expert_parts(self.settings)
        shards = self.settings.decode_context_parallel_size or 1
        plain = "bfloat16", "bfloat16"
        layers = served_uses(arch, ranks, *plain, activations, caches, expert, shards)
        return tuple(dict.fromkeys(op.op for op in (*layers, *sampling_uses(arch.vocab_size))))

    def uncovered(self, capabilities: Capabilities) -> list[str]:
        order = self.settings.kernel_order or ""
        ops = self.ops(capabilities)
        return [op for op in ops if capabilities.backend_of(op, order) is None]


def _device(machine: Machine, served: _Served, capabilities: Capabilities) -> Value[str]:
    target = capabilities.target
    missing = served.uncovered(capabilities)
    if missing:
        listed = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        default = ",".join((*capabilities.default_order, REFERENCE))
        count = len(served.ops(capabilities))
        flag = "--device" if served.settings.code_for is None else "--as"
        raise UserError(
            f"{target} has no kernels for {len(missing)} of the {count} operations of"
            f" {served.arch.name} ({listed})",
            hint=f"leave {flag} out to run where all operations have one, or allow slow"
            f" references in words: --kernel-order '*={default}'",
        )
    name = (
        f"cuda:{gpu_index(machine, served.settings, target)}"
        if target.type == "cuda"
        else target.type
    )
    if served.settings.device is not None:
        return Value(name, Origin.FLAG, "given with --device")
    if target.type == "cuda":
        return Value(name, Origin.MEASURED, "a GPU is there and every operation runs on it")
    if isinstance(machine.gpus, Unknown):
        return Value(name, Origin.MEASURED, f"no GPU is known here: {machine.gpus.why}")
    if not machine.gpus:
        return Value(name, Origin.MEASURED, "the driver lists no GPU")
    return Value(name, Origin.MEASURED, "the GPU here lacks kernels for some operations")


def _refuse_contradictions(arch: Arch, settings: EngineSettings) -> None:
    """What no machine could make right."""
    length = settings.max_model_len
    refuse_code_of_others(settings)
    if length is not None and length > arch.max_model_len:
        raise UserError(
            f"--max-model-len {length} is more than the {arch.max_model_len} tokens that"
            f" {arch.name} was made for",
            hint=f"give at most {arch.max_model_len}, or leave it out",
        )
    if settings.num_blocks_override is not None and settings.memory_utilization is not None:
        raise UserError(
            "--num-blocks and --memory-utilization both set the size of the cache",
            hint="leave one of them out",
        )


def _refuse_more_than_there_is(
    machine: Machine, settings: EngineSettings, fixed: Fixed, sizes: Sizes
) -> None:
    """With --num-blocks nobody asks what is free, but what is allocated must be there at all."""
    total = machine.memory.total_bytes
    if fixed.device_name != "cpu" and not isinstance(machine.gpus, Unknown):
        total = machine.gpus[fixed.gpu].memory_bytes
    allocated = sizes.state_bytes.value + sizes.blocks_bytes.value + sizes.activation_bytes.value
    allocated += sizes.graphs_bytes.value
    if fixed.device_name == "cpu":
        allocated *= fixed.ranks * fixed.stages
    if settings.num_blocks_override is None or isinstance(total, Unknown) or allocated <= total:
        return
    raise UserError(
        f"--num-blocks {settings.num_blocks_override} and {sizes.max_num_seqs.value} sequences take"
        f" {format_bytes(allocated)}, and there are {format_bytes(total)} in all",
        hint="give fewer --num-blocks or --max-num-seqs, or leave --num-blocks out",
    )


def _residency(served: _Served, capabilities: Capabilities) -> tuple[Value[str], Value[str]]:
    """(residency, kernel order): expanding backends run only where the order names them."""
    arch, settings = served.arch, served.settings
    residency = _flag("--weights-residency", settings.weights_residency)
    if residency is None:
        residency = Value(
            str(Residency.QUANTISED), Origin.DEFAULT, "takes the least memory and reads the least"
        )
    residency = Value(str(residency.value), residency.origin, residency.reason)
    if residency.value == Residency.QUANTISED:
        asked = _kernel_order(served, capabilities)
        return _as_the_order_has_it(arch, residency, asked, capabilities), asked
    if settings.kernel_order is not None:
        raise UserError(
            "--weights-residency expanded and --kernel-order both choose the implementations",
            hint="leave one of them out",
        )
    expanding = capabilities.expanding - {COMPOSED}
    if not expanding:
        raise UserError(
            f"no kernel on {capabilities.target} runs with expanded weights",
            hint="leave --weights-residency out",
        )
    names = (*sorted(expanding), *capabilities.default_order)
    order = "*=" + ",".join(names)
    return residency, Value(order, residency.origin, "weights are to be expanded")


def _as_the_order_has_it(
    arch: Arch, residency: Value[str], order: Value[str], capabilities: Capabilities
) -> Value[str]:
    """Expanded, where the order puts a backend first that expands the weights of a product."""
    named = ", ".join(expanding_backends(arch, order.value, capabilities))
    if not named:
        return residency
    if residency.origin is Origin.FLAG:
        raise UserError(
            f"--weights-residency {residency.value} contradicts --kernel-order: {named} expands"
            " weights",
            hint="leave one of them out",
        )
    text = f"the kernel order names {named}, which unpacks them"
    return Value(str(Residency.EXPANDED), Origin.FLAG, text)


def _kernel_order(served: _Served, capabilities: Capabilities) -> Value[str]:
    order = served.settings.kernel_order
    if order is None:
        return Value("", Origin.DEFAULT, "the device's own order")
    ops = served.ops(capabilities)
    slow = [op for op in ops if capabilities.backend_of(op, order) == REFERENCE]
    reason = "given with --kernel-order"
    if capabilities.target.type != "cpu" and slow:
        reason += f"; slow references are allowed and run for {', '.join(slow)}"
    return Value(order, Origin.FLAG, reason)
