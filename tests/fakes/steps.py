"""Drives a model through steps with block tables of its own, without scheduler or runner.

Blocks and slots are handed out in scattered order, so that nothing works by being contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from metainfer.arch.cache_kinds import BLOCK_TOKENS, Kind, Scope, cache_kinds
from metainfer.arch.record import Arch
from metainfer.arch.stages import place_of, stage_of
from metainfer.comm.group import Group, Solo
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.registry import Registry
from metainfer.models.deepseek_v4 import DeepseekV4
from metainfer.nn.builder import SideStream
from metainfer.nn.cache import CacheStorage
from metainfer.nn.inputs import DecodeInputs, StepInputs
from metainfer.ops.base import Target
from metainfer.ops.cache_formats import FP32_CACHES, CacheFormats
from metainfer.weights.load import Checkpoint

CPU = torch.device("cpu")
REFERENCE_ORDER = "*=reference"
EXPANDED_ORDER = "*=cpu_expanded,native,cpu,reference"
"""What a plan says whose weights are to be expanded."""


def load_model(
    directory: Path,
    arch: Arch,
    *,
    kernel_order: str = REFERENCE_ORDER,
    compute_dtype: torch.dtype = torch.float32,
    stream_dtype: torch.dtype | None = None,
    draft_rows: int = 0,
    registry: Registry | None = None,
    activations: str = "plain",
    caches: CacheFormats = FP32_CACHES,
    group: Group | None = None,
    context: int = 1,
    expert: int = 1,
    stages: int = 1,
    kv_shards: int = 1,
    side_stream: SideStream | None = None,
) -> DeepseekV4:
    """The checkpoint in `directory` on the CPU, as a rank of `group`, with the backends of this
    package or of `registry`."""
    group = group or Solo()
    number, rank = place_of(group.rank, group.size, stages)
    opened = Checkpoint.open(
        directory,
        arch,
        rank=rank,
        size=group.size // stages,
        context=context,
        expert=expert,
        stage=stage_of(number, stages, arch.num_layers),
    )
    with opened as checkpoint:
        return DeepseekV4(
            arch,
            checkpoint,
            registry=registry or builtin_registry(),
            target=Target("cpu"),
            kernel_order=kernel_order,
            group=group,
            context=context,
            expert=expert,
            stages=stages,
            kv_shards=kv_shards,
            device=CPU,
            compute_dtype=compute_dtype,
            stream_dtype=stream_dtype,
            draft_rows=draft_rows,
            activations=activations,
            caches=caches,
            side_stream=side_stream,
        )


@dataclass
class Track:
    """One sequence of a Driver."""

    slot: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Driver:
    """A model, a cache, and the sequences in it.

    Every row's logits are computed: what a step returns is, for each part, fp32 [rows, V], or
    nothing where another stage has the head.
    """

    def __init__(
        self,
        model: DeepseekV4,
        arch: Arch,
        *,
        num_slots: int = 4,
        num_blocks: int = 24,
        caches: CacheFormats = FP32_CACHES,
        draft_rows: int = 0,
        seed: int = 0,
        kv_shards: int = 1,
    ) -> None:
        """`kv_shards`: of the model."""
        self.kv_shards = kv_shards
        self._model, self._arch = model, arch
        self._draft_rows = draft_rows
        self._num_slots, self._num_blocks = num_slots, num_blocks
        self.cache = CacheStorage(
            arch,
            num_slots=num_slots,
            num_blocks=num_blocks,
            formats=caches,
            draft_rows=draft_rows,
            device=CPU,
            spare=True,
            layers=model.stage.layers,
        )
        generator = torch.Generator().manual_seed(seed)
        self._free_slots = torch.randperm(num_slots, generator=generator).tolist()
        self._free_blocks = torch.randperm(num_blocks, generator=generator).tolist()
        self.poison()

    def poison(self, owned: Sequence[Track] = ()) -> None:
        """NaN in every block and slot but those of `owned`."""
        for kind in cache_kinds(self._arch, self._draft_rows, self._model.stage.layers):
            if kind.scope is Scope.SEQUENCE:
                kept = [sequence.slot for sequence in owned]
            else:
                kept = [block for sequence in owned for block in sequence.blocks]
            parts = (
                self.cache.index_keys(kind.source_layer)
                if kind.kind is Kind.INDEX_KEYS
                else (self.cache.rows(kind.kind, kind.source_layer),)
            )
            for rows_ND in parts:
                blocks = rows_ND.view(-1, kind.rows_per_block, rows_ND.shape[1])
                strangers = torch.ones(len(blocks), dtype=torch.bool)
                strangers[kept] = False
                blocks[strangers] = torch.nan if rows_ND.is_floating_point() else 255

    def start(self) -> Track:
        return Track(self._free_slots.pop())

    def reject(self, sequence: Track, rows: int) -> None:
        """The last `rows` tokens of `sequence` were drafts that did not hold."""
        sequence.computed -= rows

    def finish(self, sequence: Track) -> None:
        """Give back what `sequence` owns, with its contents."""
        self._free_slots.append(sequence.slot)
        self._free_blocks += sequence.blocks

    @torch.inference_mode()
    def step(
        self,
        *parts: tuple[Track, Sequence[int]],
        decoding: int = 0,
        wanted: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """One step of the next tokens of some sequences, of which the first `decoding` count as
        decode; with `wanted` only so many of the last rows of each are given."""
        inputs = self._inputs(parts, decoding)
        counts = [len(tokens) for _, tokens in parts]
        if wanted is not None:
            ends = zip(inputs.row_starts[1:], wanted, strict=True)
            rows = [row for end, count in ends for row in range(end - count, end)]
            inputs = replace(inputs, wanted_counts=tuple(wanted), wanted_rows_W=torch.tensor(rows))
            counts = list(wanted)
        return list(self._logits(inputs, sum(counts)).split(counts))

    @torch.inference_mode()
    def fixed_step(
        self, *parts: tuple[Track, Sequence[int]], rows: int, blocks: int
    ) -> list[torch.Tensor]:
        """A decode step of `rows` rows, most of which may be padding, over tables of `blocks`."""
        inputs = self.decode_inputs(parts, rows, blocks)
        own_RV = self._logits(inputs, rows)[: sum(len(tokens) for _, tokens in parts)]
        return list(own_RV.split([len(tokens) for _, tokens in parts]))

    def _logits(self, inputs: StepInputs | DecodeInputs, rows: int) -> torch.Tensor:
        streams_RSD = self._model.forward(inputs, self.cache)
        return torch.empty(rows, 0) if streams_RSD is None else self._model.logits(streams_RSD)

    def decode_inputs(
        self, parts: Sequence[tuple[Track, Sequence[int]]], rows: int, blocks: int
    ) -> DecodeInputs:
        tables_NM = torch.full((self._num_slots + 1, blocks), -1)
        tokens, positions, slots = [0] * rows, [-1] * rows, [self._num_slots] * rows
        row = 0
        for sequence, own in parts:
            for token in own:
                self._grow(sequence, sequence.computed + 1)
                tokens[row], positions[row], slots[row] = token, sequence.computed, sequence.slot
                sequence.computed += 1
                row += 1
            tables_NM[sequence.slot, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
        return DecodeInputs(
            torch.tensor(tokens), torch.tensor(positions), torch.tensor(slots), tables_NM
        )

    def _grow(self, sequence: Track, tokens: int) -> None:
        """Blocks for so many tokens."""
        while len(sequence.blocks) * self.kv_shards * BLOCK_TOKENS < tokens:
            sequence.blocks.append(self._free_blocks.pop())

    def run(self, tokens: Sequence[int], *lengths: int) -> torch.Tensor:
        """Logits [T, V] of a new sequence computed alone, in chunks of `lengths` and then the
        rest, each as prefill."""
        sequence = self.start()
        logits, start = [], 0
        for length in [*lengths, len(tokens)]:
            chunk = tokens[start : start + length]
            if len(chunk):
                logits += self.step((sequence, chunk))
            start += length
        self.finish(sequence)
        return torch.cat(logits)

    def decode(self, tokens: Sequence[int], sequence: Track) -> torch.Tensor:
        """Logits [T, V] of the next tokens of `sequence`, each in a decode step of its own."""
        return torch.cat([self.step((sequence, [token]), decoding=1)[0] for token in tokens])

    def _inputs(self, parts: Sequence[tuple[Track, Sequence[int]]], decoding: int) -> StepInputs:
        starts, computed = [0], []
        positions: list[int] = []
        owner: list[int] = []
        for index, (sequence, tokens) in enumerate(parts):
            end = sequence.computed + len(tokens)
            self._grow(sequence, end)
            positions += range(sequence.computed, end)
            owner += [index] * len(tokens)
            starts.append(starts[-1] + len(tokens))
            computed.append(sequence.computed)
            sequence.computed = end
        longest = max(len(sequence.blocks) for sequence, _ in parts)
        table = [s.blocks + [-1] * (longest - len(s.blocks)) for s, _ in parts]
        return StepInputs(
            token_ids_T=torch.tensor([token for _, tokens in parts for token in tokens]),
            positions_T=torch.tensor(positions),
            sequence_T=torch.tensor(owner),
            row_starts=tuple(starts),
            computed=tuple(computed),
            slots=tuple(sequence.slot for sequence, _ in parts),
            state_slots_B=torch.tensor([sequence.slot for sequence, _ in parts]),
            block_table_BM=torch.tensor(table),
            num_decode_sequences=decoding,
            logits_rows_R=torch.arange(starts[-1]),
        )
