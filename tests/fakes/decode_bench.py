"""Sequences that are prefilled and decoded greedily by a model on any device, decode steps in fixed
shapes or in shapes of their own, without sampler or scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from metainfer.arch.cache_kinds import BLOCK_TOKENS, blocks_for
from metainfer.arch.families import read_arch
from metainfer.comm.group import Solo
from metainfer.hardware.probe import probe
from metainfer.kernels.builtin import builtin_registry
from metainfer.llm.batch import BatchBuilder
from metainfer.llm.graphs import DecodeSteps, Graphs
from metainfer.llm.make_runner import side_stream
from metainfer.llm.step import SequenceStep, Step, StepKind
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.nn.cache import CacheStorage
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import CacheFormats, cache_formats
from metainfer.plan.build import build_plan
from metainfer.plan.settings import EngineSettings
from metainfer.shipped import pebble_dir
from metainfer.weights.load import Checkpoint

MAX_LEN = 1024
SLOTS = 10


@dataclass
class Loaded:
    """The shipped model on a device, as the plan has it."""

    model: DeepseekV4
    vocab_size: int
    caches: CacheFormats
    device: torch.device

    def cache(self) -> CacheStorage:
        return CacheStorage(
            read_arch(pebble_dir()),
            num_slots=SLOTS,
            num_blocks=SLOTS * MAX_LEN // BLOCK_TOKENS,
            formats=self.caches,
            draft_rows=0,
            device=self.device,
            spare=True,
        )


def load_pebble(target: Target, **flags: object) -> Loaded:
    """The shipped model with the kernels that the plan for `target` chooses."""
    arch, registry = read_arch(pebble_dir()), builtin_registry()
    settings = EngineSettings(device=target.type, max_model_len=MAX_LEN, **flags)
    plan = build_plan(probe(), arch, settings, registry.capabilities(target))
    device = torch.device(plan.device.value)
    caches = cache_formats(arch, plan.cache_dtype.value, plan.index_cache_dtype.value)
    with Checkpoint.open(pebble_dir(), arch) as checkpoint:
        model = DeepseekV4(
            arch,
            checkpoint,
            registry=registry,
            target=target,
            kernel_order=plan.kernel_order.value,
            group=Solo(),
            device=device,
            compute_dtype=getattr(torch, plan.compute_dtype.value),
            activations=plan.activations.value,
            caches=caches,
            side_stream=side_stream(plan, device),
        )
    return Loaded(model, arch.vocab_size, caches, device)


@dataclass
class Track:
    """One sequence: its slot, scattered blocks, known tokens."""

    slot: int
    tokens: list[int]
    computed: int = 0
    blocks: tuple[int, ...] = field(default=())


class DecodeBench:
    """Greedy decoding of some sequences.

    Args:
        row_sizes, block_sizes: of fixed shapes; None: every step has shapes of its own.
    """

    def __init__(
        self,
        loaded: Loaded,
        row_sizes: tuple[int, ...] | None,
        block_sizes: tuple[int, ...] = (2, 4, 8),
        graphs: Graphs | None = None,
    ) -> None:
        self.loaded = loaded
        self.cache = loaded.cache()
        self.batch = BatchBuilder(SLOTS, MAX_LEN // BLOCK_TOKENS, loaded.device)
        self.steps: DecodeSteps[CacheStorage] | None = None
        if row_sizes is not None:
            self.steps = DecodeSteps(
                loaded.model,
                self.cache,
                self.batch.tables_NM,
                spare_slot=self.batch.spare_slot,
                vocab_size=loaded.vocab_size,
                row_sizes=row_sizes,
                block_sizes=block_sizes,
                graphs=graphs,
            )
            with torch.inference_mode():
                self.steps.capture()

    def start(self, slot: int, prompt: list[int]) -> Track:
        """A sequence whose prompt is computed; its blocks lie apart."""
        count = MAX_LEN // BLOCK_TOKENS
        blocks = tuple(SLOTS * n + (slot * 7 + n) % SLOTS for n in range(count))
        track = Track(slot, list(prompt), blocks=blocks)
        self.step(track)
        return track

    def preempt(self, track: Track, slot: int) -> Track:
        """The sequence loses its cache and is computed anew in another slot."""
        return self.start(slot, track.tokens)

    @torch.inference_mode()
    def step(self, *tracks: Track) -> torch.Tensor:
        """fp32 logits [B, V] behind the known tokens of each, on the CPU; the likeliest become
        known."""
        step = self.described(*tracks)
        shape = self.steps.shape_of(step) if self.steps is not None else None
        if self.steps is not None and shape is not None:
            numbers = self.batch.decode_rows(step, shape.rows)
            logits_BV = self.steps.run(shape, numbers)[: len(tracks)]
        else:
            inputs = self.batch.build(step)
            streams_TSD = self.loaded.model.forward(inputs, self.cache)
            logits_BV = self.loaded.model.logits(streams_TSD[inputs.logits_rows_R])
        logits_BV = logits_BV.to("cpu", copy=True)
        for track, token in zip(tracks, logits_BV.argmax(-1).tolist(), strict=True):
            track.computed = len(track.tokens)
            track.tokens.append(token)
        return logits_BV

    def described(self, *tracks: Track) -> Step:
        """The step that computes the pending tokens of each."""
        parts = tuple(
            SequenceStep(
                request_id=str(track.slot),
                state_slot=track.slot,
                blocks=track.blocks[: blocks_for(len(track.tokens))],
                start=track.computed,
                token_ids=tuple(track.tokens[track.computed :]),
                sample_rows=1,
            )
            for track in tracks
        )
        decoding = sum(len(part.token_ids) == 1 for part in parts)
        return Step(0, StepKind.MIXED, parts, decoding)
