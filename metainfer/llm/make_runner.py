"""From a plan and a checkpoint to a runner: the model, its cache and the sampler in memory."""

from __future__ import annotations

import logging

import torch

from metainfer.arch.cache_kinds import blocks_for
from metainfer.arch.record import Arch
from metainfer.comm.group import Group, Solo
from metainfer.core.units import format_bytes
from metainfer.kernels.registry import Kernel, Registry
from metainfer.llm.graphs import CudaGraphs
from metainfer.llm.runner import FixedShapes, Runner
from metainfer.llm.sample import Sampler
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.nn.builder import SideStream
from metainfer.nn.cache import CacheStorage
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import cache_formats
from metainfer.plan.plan import Plan
from metainfer.weights.load import Checkpoint

_log = logging.getLogger(__name__)


def make_runner(
    arch: Arch,
    plan: Plan,
    checkpoint: Checkpoint,
    registry: Registry,
    target: Target,
    *,
    group: Group | None = None,
    on_paper: bool = False,
) -> tuple[tuple[Kernel, ...], Runner[CacheStorage]]:
    """What was bound, and who runs the model, which is in memory with its cache.

    Args:
        group: of this rank; None for one that is alone.
        on_paper: all tensors are on the device "meta", without numbers; no graphs are made.
    """
    device = torch.device("meta" if on_paper else plan.device.value)
    side = None if on_paper else side_stream(plan, device)
    caches = cache_formats(arch, plan.cache_dtype.value, plan.index_cache_dtype.value)
    draft_rows = plan.draft_rows.value
    model = DeepseekV4(
        arch,
        checkpoint,
        registry=registry,
        target=target,
        kernel_order=plan.kernel_order.value,
        group=group or Solo(),
        context=plan.prefill_context_parallel_size.value,
        expert=plan.expert_parallel_size.value,
        stages=plan.pipeline_parallel_size.value,
        kv_shards=plan.decode_context_parallel_size.value,
        device=device,
        compute_dtype=getattr(torch, plan.compute_dtype.value),
        activations=plan.activations.value,
        caches=caches,
        side_stream=side,
        draft_rows=draft_rows,
    )
    cache = CacheStorage(
        arch,
        num_slots=plan.max_num_seqs.value,
        num_blocks=plan.num_blocks.value,
        formats=caches,
        draft_rows=draft_rows,
        device=device,
        spare=bool(plan.cuda_graph_sizes.value),
        layers=model.stage.layers,
    )
    _log.debug(
        "weights %s, cache %s", format_bytes(model.weights_nbytes), format_bytes(cache.nbytes)
    )
    sampler = Sampler(
        registry,
        target,
        arch.vocab_size,
        device,
        num_slots=plan.max_num_seqs.value,
        kernel_order=plan.kernel_order.value,
    )
    runner = Runner(
        model,
        cache,
        sampler=sampler,
        vocab_size=arch.vocab_size,
        eos_token_ids=arch.eos_token_ids,
        num_slots=plan.max_num_seqs.value,
        max_blocks=blocks_for(plan.max_model_len.value, plan.block_tokens),
        device=device,
        fixed=_fixed_shapes(plan, on_paper),
        draws=model.stage.is_last,
    )
    return (*model.kernels, *sampler.kernels), runner


def side_stream(plan: Plan, device: torch.device) -> SideStream | None:
    """That of the shared expert."""
    said = plan.shared_expert_stream.value
    if said == "off":
        return None
    return SideStream(torch.cuda.Stream(device), None if said == "on" else int(said))


def _fixed_shapes(plan: Plan, on_paper: bool) -> FixedShapes | None:
    """Of decode steps; None where the plan has none."""
    rows = plan.cuda_graph_sizes.value
    if not rows:
        return None
    blocks = [blocks_for(tokens, plan.block_tokens) for tokens in plan.cuda_graph_contexts.value]
    graphs = CudaGraphs() if plan.cuda_graphs.value == "on" and not on_paper else None
    return FixedShapes(rows, tuple(dict.fromkeys(blocks)), graphs)
