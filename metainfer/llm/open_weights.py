"""A rank's view of the weights: of the files of a checkpoint, or drawn at random."""

from __future__ import annotations

import logging
from pathlib import Path

from metainfer.arch.overrides import cuts_layers
from metainfer.arch.record import Arch
from metainfer.core.units import format_bytes, format_seconds
from metainfer.plan.plan import Plan
from metainfer.plan.settings import EngineSettings, LoadFormat
from metainfer.weights.dummy import DummyCheckpoint
from metainfer.weights.load import Checkpoint, LoadProgress

_log = logging.getLogger(__name__)


def open_weights(
    source: Path,
    arch: Arch,
    settings: EngineSettings,
    plan: Plan,
    on_progress: LoadProgress | None,
    *,
    rank: int = 0,
) -> Checkpoint:
    """
    Args:
        plan: as the rank reads it.
        rank: of all stages.

    Raises UserError, CheckpointError: as `Checkpoint.open`.
    """
    size, context = plan.tensor_parallel_size.value, plan.prefill_context_parallel_size.value
    expert = plan.expert_parallel_size.value
    stage, rank = plan.place_of(rank, arch.num_layers)
    if settings.load_format == LoadFormat.DUMMY:
        return DummyCheckpoint(
            arch,
            plan.device.value,
            rank=rank,
            size=size,
            context=context,
            expert=expert,
            stage=stage,
            on_progress=on_progress,
        )
    return Checkpoint.open(
        source,
        arch,
        rank=rank,
        size=size,
        context=context,
        expert=expert,
        stage=stage,
        on_progress=on_progress,
        more_layers=cuts_layers(settings.hf_overrides),
    )


def say_loaded(checkpoint: Checkpoint, took_s: float) -> None:
    """How much this rank took, and how fast."""
    taken = checkpoint.bytes_taken
    rate = format_bytes(int(taken / max(took_s, 1e-9)))
    _log.info("loaded %s in %s, %s/s", format_bytes(taken), format_seconds(took_s), rate)
