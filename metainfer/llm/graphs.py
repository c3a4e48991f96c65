"""Decode steps in a few fixed shapes, each captured once as a CUDA graph and replayed.

A shape is a number of rows and of blocks of the longest sequence. A step takes the smallest one
that holds it; what is left over is padding, which reads nothing. Without graphs the same shapes run
kernel by kernel, so that both give the same bits.

Shape suffixes: T rows, N slots, M blocks, V tokens of the vocabulary.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from metainfer.core.units import format_bytes, format_seconds
from metainfer.llm.step import Step
from metainfer.nn.inputs import DecodeInputs

_log = logging.getLogger(__name__)

Work = Callable[[], None]
ReadTokens = Callable[[torch.Tensor, torch.Tensor], None]
"""See `BatchBuilder.read`."""
C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


class Shape(NamedTuple):
    """Rows of a step, and blocks of its longest sequence."""

    rows: int
    blocks: int


class DecodeModel(Protocol[C_contra]):
    """What decode steps need of a model; see `llm.runner.Model`."""

    def forward(self, inputs: DecodeInputs, cache: C_contra) -> torch.Tensor | None: ...

    def logits(self, streams_RSD: torch.Tensor) -> torch.Tensor: ...


class Graphs(Protocol):
    """Makes graphs of work on a device."""

    def capture(self, work: Work) -> Work:
        """Note what `work` asks of the device, without doing it. Calling what this returns does it,
        on the same tensors."""


class CudaGraphs:
    """Graphs of the current GPU that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            work()
        replay: Work = graph.replay
        return replay


class DecodeSteps(Generic[C]):
    """Runs decode steps of a model in fixed shapes.

    Args:
        tables_NM: block tables of all slots, on the device; may be written between steps.
        spare_slot: of padding.
        vocab_size: width of logits; 0 where another stage makes them.
        row_sizes, block_sizes: of shapes, ascending.
        graphs: makes the graphs; None: steps run kernel by kernel.

    Attributes:
        num_captured: shapes that have a graph.
        num_missed: decode steps that should have one and have none, those that are larger than all
            shapes among them.
    """

    def __init__(
        self,
        model: DecodeModel[C],
        cache: C,
        tables_NM: torch.Tensor,
        *,
        spare_slot: int,
        vocab_size: int,
        row_sizes: Sequence[int],
        block_sizes: Sequence[int],
        graphs: Graphs | None,
    ) -> None:
        self._model, self._cache, self._tables_NM = model, cache, tables_NM
        self._spare_slot = spare_slot
        self._row_sizes, self._block_sizes = tuple(row_sizes), tuple(block_sizes)
        self._graphs = graphs
        self._replays: dict[Shape, Work] = {}
        most, device = self._row_sizes[-1], tables_NM.device
        # What graphs read and write lies in the same places for all shapes.
        self._numbers = torch.zeros(3 * most, dtype=torch.int64, device=device)
        self._logits_TV = torch.zeros(most, vocab_size, device=device)
        self.num_missed = 0

    @property
    def num_captured(self) -> int:
        return len(self._replays)

    def shapes(self) -> Iterator[Shape]:
        """All shapes, the largest first."""
        for rows in reversed(self._row_sizes):
            for blocks in reversed(self._block_sizes):
                yield Shape(rows, blocks)

    def shape_of(self, step: Step) -> Shape | None:
        """The smallest shape that holds `step`; None where it is not a decode step, wants more than
        logits, or is larger than all."""
        if not _wants_shape(step):
            return None
        wanted = _exact_shape(step)
        rows = bisect_left(self._row_sizes, wanted.rows)
        blocks = bisect_left(self._block_sizes, wanted.blocks)
        if rows == len(self._row_sizes) or blocks == len(self._block_sizes):
            return None
        return Shape(self._row_sizes[rows], self._block_sizes[blocks])

    def note_shapeless(self, step: Step) -> None:
        """Count a step that has no shape, where it is a decode step that is larger than all."""
        if _wants_shape(step):
            self._note_missed(_exact_shape(step))

    def capture(self) -> None:
        """Run every shape once, and make graphs of them; the cache's spare rows alone change. Call
        it in inference mode."""
        began_s, free = time.perf_counter(), _free_bytes(self._tables_NM.device)
        for shape in self.shapes():
            work = self._work(shape)
            self._fill_with_padding(shape)
            work()  # kernels are compiled, and libraries take their memory
            if self._graphs is not None:
                self._replays[shape] = self._graphs.capture(work)
        if self._replays:
            taken = free - _free_bytes(self._tables_NM.device)
            _log.info(
                "%d graphs of decode steps were made in %s and took %s",
                len(self._replays),
                format_seconds(time.perf_counter() - began_s),
                format_bytes(max(0, taken)),
            )

    def rehearse(self, shape: Shape) -> None:
        """Start what a step of this shape starts, of padding alone."""
        self._fill_with_padding(shape)
        self._work(shape)()

    def run(
        self, shape: Shape, numbers: torch.Tensor, read: ReadTokens | None = None
    ) -> torch.Tensor:
        """Compute a step; returns fp32 logits [T, V] of its rows and of padding, which the next
        call overwrites.

        Args:
            numbers: as `BatchBuilder.decode_rows` makes them for the shape's rows.
            read: fills in tokens that only the device knows.
        """
        self._numbers[: 3 * shape.rows].copy_(numbers, non_blocking=True)
        if read is not None:
            tokens_T, _, slots_T = self._vectors(shape)
            read(tokens_T, slots_T)
        work = self._replays.get(shape)
        if work is None:
            self._note_missed(shape)
            work = self._work(shape)
        work()
        return self._logits_TV[: shape.rows]

    def _work(self, shape: Shape) -> Work:
        """A step of one shape, from the numbers to the logits."""
        logits_TV = self._logits_TV[: shape.rows]
        tokens_T, positions_T, slots_T = self._vectors(shape)
        tables_NM = self._tables_NM[:, : shape.blocks]
        # Of two sizes that follow each other the larger one is always full.
        may_pad = shape.rows > 1 and shape.rows - 1 not in self._row_sizes
        inputs = DecodeInputs(tokens_T, positions_T, slots_T, tables_NM, may_pad)

        def work() -> None:
            streams_TSD = self._model.forward(inputs, self._cache)
            if streams_TSD is not None:
                logits_TV.copy_(self._model.logits(streams_TSD))

        return work

    def _vectors(self, shape: Shape) -> tuple[torch.Tensor, ...]:
        """Tokens, positions and slots, as the graphs of `shape` read them."""
        return self._numbers[: 3 * shape.rows].view(3, shape.rows).unbind(0)

    def _fill_with_padding(self, shape: Shape) -> None:
        tokens_T, positions_T, slots_T = self._vectors(shape)
        tokens_T.zero_()
        positions_T.fill_(-1)
        slots_T.fill_(self._spare_slot)

    def _note_missed(self, shape: Shape) -> None:
        if self._graphs is None:
            return
        if self.num_missed == 0:
            _log.warning(
                "a decode step of %d rows over %d blocks has no graph and runs kernel by kernel;"
                " the largest shape has %d rows over %d blocks",
                *shape,
                self._row_sizes[-1],
                self._block_sizes[-1],
            )
        self.num_missed += 1


def _wants_shape(step: Step) -> bool:
    """Whether it is a decode step that wants logits alone."""
    if step.num_decode_sequences < len(step.sequences):
        return False
    return not any(part.prompt_logprobs for part in step.sequences)


def _exact_shape(step: Step) -> Shape:
    """Its own rows and blocks."""
    return Shape(step.num_rows, max(len(part.blocks) for part in step.sequences))


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free: int = torch.cuda.mem_get_info(device)[0]
    return free
