"""Memory: how long, how many and how much cache: what fits beside the weights.

First the longest sequence must fit alone; then blocks are added up to what all sequences could use.
Where the user left a number open it is lowered until it fits; a number that was given is kept, or
refused with the amounts.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.arch.cache_kinds import BLOCK_TOKENS, blocks_for
from metainfer.arch.record import Arch
from metainfer.arch.stages import Stage, stage_of
from metainfer.core.errors import UserError
from metainfer.core.units import format_bytes, format_count
from metainfer.hardware.machine import Machine, Unknown
from metainfer.ops.cache_formats import CacheFormats
from metainfer.plan.graphs import graph_contexts, graph_rows, graphs_bytes
from metainfer.plan.ledger import (
    GPU_WORKSPACE_BYTES,
    KERNEL_WORKSPACE_BYTES,
    activation_bytes,
    block_bytes,
    exchange_of_shards,
    state_bytes,
    weights_bytes,
)
from metainfer.plan.plan import Origin, Value
from metainfer.plan.ranks import rank_gpus
from metainfer.plan.settings import EngineSettings

# Other programs live in the host's memory too.
_DEFAULT_SHARE = {"cpu": 0.8, "cuda": 0.9}
_DEFAULT_SEQS = 64


@dataclass(frozen=True, slots=True)
class Fixed:
    """What is settled before memory is divided. `gpu`: which one of the machine's, on a GPU."""

    device_name: str
    gpu: int
    compute_dtype: str
    caches: CacheFormats
    residency: str
    batched_tokens: int
    draft_rows: int
    captures: bool  # decode steps are captured as graphs
    ranks: int = 1  # that share the model; all sizes are of one of them
    context: int = 1  # of these, that share the tokens of long prefills
    kv_shards: int = 1  # of these, over which growing caches are divided
    expert: int = 1  # parts of these over which experts are dealt
    stages: int = 1  # of a pipeline, each of so many ranks

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS * self.kv_shards


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that depend on memory, and the ledger."""

    max_model_len: Value[int]
    max_num_seqs: Value[int]
    num_blocks: Value[int]
    weights_bytes: Value[int]
    state_bytes: Value[int]
    blocks_bytes: Value[int]
    activation_bytes: Value[int]
    exchange_bytes: Value[int]
    graph_rows: Value[tuple[int, ...]]
    graph_contexts: Value[tuple[int, ...]]
    graphs_bytes: Value[int]


def fit_memory(machine: Machine, arch: Arch, settings: EngineSettings, fixed: Fixed) -> Sizes:
    """Raises UserError, with the amounts and the flag to change, for what does not fit."""
    fit = _Fit(arch, settings, fixed, _budget(machine, settings, fixed), _parts(arch, fixed))
    length, seqs = fit.length_and_seqs()
    blocks = fit.blocks(length.value, seqs.value)
    rows, contexts = fit.graph_shapes(length.value, seqs.value)
    part = fit.fullest(seqs.value, blocks.value)
    return Sizes(
        max_model_len=length,
        max_num_seqs=seqs,
        num_blocks=blocks,
        weights_bytes=Value(
            part.weights,
            Origin.MODEL,
            _weights_reason(fixed, part),
        ),
        state_bytes=Value(
            seqs.value * part.sequence,
            Origin.MODEL,
            f"{format_bytes(part.sequence)} of rings for each of {seqs.value} sequences",
        ),
        blocks_bytes=Value(
            blocks.value * part.block,
            Origin.MODEL,
            _blocks_reason(fixed, part),
        ),
        activation_bytes=Value(
            fit.activations(length.value, seqs.value),
            Origin.MODEL,
            f"the most that a step of {format_count(fixed.batched_tokens)} rows holds at once",
        ),
        exchange_bytes=Value(
            fit.exchange(length.value, seqs.value),
            Origin.MODEL,
            _exchange_reason(fixed, length.value),
        ),
        graph_rows=rows,
        graph_contexts=contexts,
        graphs_bytes=Value(
            fit.graphs(length.value, seqs.value),
            Origin.MODEL,
            _graphs_reason(len(rows.value) * len(contexts.value), fixed.captures),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes on a rank of one stage: weights, rings of a sequence, a block."""

    stage: Stage
    weights: int
    sequence: int
    block: int

    def total(self, seqs: int, blocks: int) -> int:
        return self.weights + seqs * self.sequence + blocks * self.block


def _parts(arch: Arch, fixed: Fixed) -> tuple[_Part, ...]:
    """Of all stages."""
    stages = [stage_of(n, fixed.stages, arch.num_layers) for n in range(fixed.stages)]
    shared = fixed.ranks, fixed.context, fixed.expert
    return tuple(
        _Part(
            stage,
            weights_bytes(arch, fixed.residency, fixed.compute_dtype, *shared, stage),
            state_bytes(arch, 1, fixed.caches, fixed.draft_rows, stage.layers),
            block_bytes(arch, fixed.caches, stage.layers),
        )
        for stage in stages
    )


def _weights_reason(fixed: Fixed, part: _Part) -> str:
    whole = f"all tensors of the checkpoint that are used, {fixed.residency}"
    if fixed.stages > 1:
        layers, number = part.stage.layers, part.stage.number + 1
        whole = f"layers {layers.start} to {layers.stop - 1}, {fixed.residency}"
        whole += f", on stage {number} of {fixed.stages}, which needs most"
    return whole if fixed.ranks == 1 else f"a rank's part of {whole}"


def _blocks_reason(fixed: Fixed, part: _Part) -> str:
    own = f"{format_bytes(part.block)} for each block of {fixed.block_tokens} tokens"
    return own if fixed.kv_shards == 1 else f"{own}, of which a rank keeps {BLOCK_TOKENS}"


def _exchange_reason(fixed: Fixed, length: int) -> str:
    if fixed.kv_shards == 1:
        return "every rank keeps the whole caches of its sequences"
    return (
        f"entries of one layer of {format_count(length)} tokens, gathered from"
        f" {fixed.kv_shards} ranks, and queries and results of their heads"
    )


def _graphs_reason(shapes: int, captures: bool) -> str:
    if not shapes:
        return "decode steps take the shapes that they have"
    if not captures:
        return "a slot and a block to spare, and logits of steps of fixed shapes"
    return f"{shapes} graphs and the memory that they share, a slot and a block to spare, logits"


@dataclass(frozen=True, slots=True)
class _Budget:
    """Bytes that may be taken, and where the number comes from. None: nobody asks."""

    bytes: int | None
    text: str


def _budget(machine: Machine, settings: EngineSettings, fixed: Fixed) -> _Budget:
    if settings.num_blocks_override is not None:
        return _Budget(None, "")
    share = settings.memory_utilization or _DEFAULT_SHARE[fixed.device_name]
    free = _free_bytes(machine, fixed)
    if isinstance(free, Unknown):
        raise UserError(
            f"how much memory is free is unknown: {free.why}",
            hint="give the size of the cache with --num-blocks",
        )
    amount = int(free * share)
    text = f"{format_bytes(amount)}, {100 * share:g}% of the {format_bytes(free)} that are free"
    everyone = fixed.ranks * fixed.stages
    if everyone > 1 and fixed.device_name == "cpu":
        amount //= everyone
        text = f"{format_bytes(amount)} for each of {everyone} ranks, {text.partition(', ')[2]}"
    return _Budget(amount, text)


def _free_bytes(machine: Machine, fixed: Fixed) -> int | Unknown:
    if fixed.device_name == "cpu":
        return machine.memory.available_bytes
    if isinstance(machine.gpus, Unknown):
        return machine.gpus
    gpus = rank_gpus(machine, fixed.gpu, fixed.ranks * fixed.stages)
    return min(gpu.free_bytes for gpu in gpus) if gpus else Unknown("no GPU is listed")


@dataclass(frozen=True, slots=True)
class _Fit:
    """The arithmetic of what fits."""

    arch: Arch
    settings: EngineSettings
    fixed: Fixed
    budget: _Budget
    parts: tuple[_Part, ...]  # of all stages

    def fullest(self, seqs: int, blocks: int) -> _Part:
        """Of the stage that needs most."""
        return max(self.parts, key=lambda part: part.total(seqs, blocks))

    def activations(self, length: int, seqs: int) -> int:
        fixed = self.fixed
        on_cpu = fixed.device_name == "cpu"
        return activation_bytes(
            self.arch,
            fixed.batched_tokens,
            seqs,
            length,
            fixed.compute_dtype,
            KERNEL_WORKSPACE_BYTES if on_cpu else GPU_WORKSPACE_BYTES,
            fixed.ranks,
            fixed.expert,
        )

    def exchange(self, length: int, seqs: int) -> int:
        fixed = self.fixed
        rows = min(seqs * (1 + fixed.draft_rows), fixed.batched_tokens)
        return exchange_of_shards(
            self.arch, rows, length, fixed.compute_dtype, fixed.caches, fixed.ranks, fixed.kv_shards
        )

    def steps(self, length: int, seqs: int) -> int:
        """Bytes that steps hold beside weights and caches."""
        held = self.activations(length, seqs) + self.exchange(length, seqs)
        return held + self.graphs(length, seqs)

    def blocks_for(self, tokens: int) -> int:
        return blocks_for(tokens, self.fixed.block_tokens)

    def graph_shapes(
        self, length: int, seqs: int
    ) -> tuple[Value[tuple[int, ...]], Value[tuple[int, ...]]]:
        """Rows and contexts of decode steps of fixed shapes."""
        fixed = self.fixed
        most = min(seqs * (1 + fixed.draft_rows), fixed.batched_tokens)
        rows = graph_rows(fixed.device_name, self.settings, most)
        return rows, graph_contexts(fixed.device_name, length)

    def graphs(self, length: int, seqs: int) -> int:
        fixed = self.fixed
        rows, contexts = self.graph_shapes(length, seqs)
        return graphs_bytes(
            self.arch,
            rows.value,
            contexts.value,
            captured=fixed.captures,
            compute_dtype=fixed.compute_dtype,
            caches=fixed.caches,
            draft_rows=fixed.draft_rows,
            ranks=fixed.ranks,
        )

    def needed(self, length: int, seqs: int) -> int:
        """Bytes for `seqs` sequences of which one may be `length` tokens long."""
        blocks = self.blocks_for(length)
        return self.fullest(seqs, blocks).total(seqs, blocks) + self.steps(length, seqs)

    def fits(self, length: int, seqs: int) -> bool:
        return self.budget.bytes is None or self.needed(length, seqs) <= self.budget.bytes

    def length_and_seqs(self) -> tuple[Value[int], Value[int]]:
        """(longest sequence, sequences at once)."""
        length, seqs = self._wanted_length(), self._wanted_seqs()
        if self.fits(length.value, seqs.value):
            return length, seqs
        if seqs.origin is not Origin.FLAG:
            seqs = self._fewer_seqs(length.value)
        if not self.fits(length.value, seqs.value) and length.origin is not Origin.FLAG:
            length = self._shorter(seqs.value)
        if not self.fits(length.value, seqs.value):
            self._refuse(length.value, seqs.value)
        return length, seqs

    def blocks(self, length: int, seqs: int) -> Value[int]:
        """Blocks of the cache, once the longest sequence is known to fit."""
        given = self.settings.num_blocks_override
        if given is not None:
            return Value(given, Origin.FLAG, "given with --num-blocks")
        useful = seqs * self.blocks_for(length)
        growing = [part for part in self.parts if part.block]
        if self.budget.bytes is None or not growing:
            return Value(useful, Origin.MODEL, "no cache of this model grows with the tokens")
        left = self.budget.bytes - self.steps(length, seqs)
        possible = min((left - part.total(seqs, 0)) // part.block for part in growing)
        if possible < useful:
            return Value(possible, Origin.MEASURED, f"what is left of {self.budget.text}")
        reason = f"all that {seqs} sequences of {format_count(length)} tokens could use"
        return Value(useful, Origin.MODEL, reason)

    def _wanted_length(self) -> Value[int]:
        given, blocks = self.settings.max_model_len, self.settings.num_blocks_override
        held = (blocks or 0) * self.fixed.block_tokens
        if blocks is not None and held < (given or self.arch.max_model_len):
            if given is None:
                return Value(held, Origin.FLAG, f"what {blocks} --num-blocks hold")
            raise UserError(
                f"--num-blocks {blocks} holds {held} tokens, fewer than --max-model-len {given}",
                hint=f"give at least --num-blocks {self.blocks_for(given)}",
            )
        if given is not None:
            return Value(given, Origin.FLAG, "given with --max-model-len")
        return Value(self.arch.max_model_len, Origin.MODEL, "what the model was made for")

    def _wanted_seqs(self) -> Value[int]:
        given = self.settings.max_num_seqs
        if given is not None:
            return Value(given, Origin.FLAG, "given with --max-num-seqs")
        return Value(_DEFAULT_SEQS, Origin.DEFAULT, "more at once would make each one slow")

    def _fewer_seqs(self, length: int) -> Value[int]:
        """As many as fit, in halves; 1 if none do."""
        seqs = _DEFAULT_SEQS
        while seqs > 1 and not self.fits(length, seqs):
            seqs //= 2
        return Value(seqs, Origin.MEASURED, f"what fits into {self.budget.text}")

    def _shorter(self, seqs: int) -> Value[int]:
        """The longest sequence that fits, in whole blocks; one block if none does."""
        low, high = 1, self.blocks_for(self.arch.max_model_len)
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(middle * self.fixed.block_tokens, seqs):
                low = middle
            else:
                high = middle - 1
        length = min(low * self.fixed.block_tokens, self.arch.max_model_len)
        return Value(length, Origin.MEASURED, f"what fits into {self.budget.text}")

    def _refuse(self, length: int, seqs: int) -> None:
        needed = self.needed(length, seqs)
        part, work = self.fullest(seqs, self.blocks_for(length)), self.activations(length, seqs)
        state = seqs * part.sequence
        graphs = self.graphs(length, seqs)
        work += self.exchange(length, seqs)
        cache = needed - part.weights - state - work - graphs
        hints = []
        if self.settings.max_model_len is not None and length > BLOCK_TOKENS:
            hints.append("a shorter --max-model-len")
        if seqs > 1:
            hints.append("fewer --max-num-seqs")
        if self.settings.max_num_batched_tokens is not None:
            hints.append("fewer --max-num-batched-tokens")
        hints.append("a larger --memory-utilization, or more memory")
        graphs_text = f", graphs {format_bytes(graphs)}" if graphs else ""
        if self.fixed.captures:
            hints.insert(-1, "--enforce-eager")
        raise UserError(
            f"{self.arch.name} does not fit: {format_bytes(needed)} are needed for one sequence of"
            f" {format_count(length)} tokens (weights {format_bytes(part.weights)}, state"
            f" {format_bytes(state)}, cache {format_bytes(cache)}, activations"
            f" {format_bytes(work)}{graphs_text}), and there are {self.budget.text}",
            hint="what helps: " + ", ".join(hints),
        )
