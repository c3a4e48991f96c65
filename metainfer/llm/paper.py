"""Paper: which kernels a plan compiles, found without running any of them.

The plan's model, cache and sampler are made on the device "meta", where a launch is only noted:
what it would compile follows from shapes. Warm-up and its test ask the same question here, so that
no list of sizes has to be guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from metainfer.arch.record import Arch
from metainfer.comm.on_paper import OnPaper
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.torch_products.shapes import library_shapes
from metainfer.kernels.triton.record import RecordingLauncher
from metainfer.kernels.tuned import UNTUNED, Tuned
from metainfer.llm.graphs import Shape
from metainfer.llm.made_steps import Family, Room, families
from metainfer.llm.make_runner import make_runner
from metainfer.llm.step import Step
from metainfer.ops.base import Target
from metainfer.plan.plan import Plan
from metainfer.weights.shapes import ShapesOnly

Units = frozenset[Any]
"""Pieces of machine code: `kernels.triton.record.CompileUnit`, `kernels.gpu.program.CudaUnit`."""


class Paper:
    """What steps would compile on GPUs of `target` with so many multiprocessors. Used by one
    thread.

    Args:
        tuned: which backends were measured to be the best.
        portable: the code runs from its PTX (`Launcher.portable`).

    Attributes:
        borders: rows beyond which another backend was measured to be the best, ascending.
    """

    def __init__(
        self,
        arch: Arch,
        plan: Plan,
        target: Target,
        multiprocessors: int,
        tuned: Tuned = UNTUNED,
        *,
        portable: bool = False,
    ) -> None:
        assert target.capability is not None, "kernels are compiled for GPUs"
        self._launch = RecordingLauncher(target.capability, multiprocessors, portable=portable)
        arch = with_few_layers(arch)
        registry = builtin_registry(self._launch).with_tuned(tuned)
        self._products = library_shapes()
        ranks, context = plan.tensor_parallel_size.value, plan.prefill_context_parallel_size.value
        expert = plan.expert_parallel_size.value
        # One stage of all layers: those of a pipeline compile no more than that.
        stages = plan.pipeline_parallel_size
        plan = replace(plan, pipeline_parallel_size=replace(stages, value=1))
        group = OnPaper(0, ranks) if ranks > 1 else None
        with torch.device("meta"):
            kernels, self._runner = make_runner(
                arch,
                plan,
                ShapesOnly(arch, ranks, context, expert),
                registry,
                target,
                group=group,
                on_paper=True,
            )
        ends = {part.most_rows for kernel in kernels for part in kernel.parts}
        self.borders = tuple(sorted(end for end in ends if end is not None))

    def of_step(self, step: Step) -> Units:
        return self._noted(lambda: self._runner.rehearse(step))

    def of_draws(self) -> Units:
        """Of sampling in all forms."""
        return self._noted(self._runner.rehearse_draws)

    def of_shapes(self) -> Units:
        """Of decode steps of fixed shapes, which warm-up runs all: of those with the most or the
        fewest rows or the longest or the shortest context, between which nothing else is chosen."""
        steps = self._runner.decode_steps
        shapes = [] if steps is None else list(steps.shapes())
        most, fewest = shapes[:1], shapes[-1:]
        edges = {side for shape in (*most, *fewest) for side in enumerate(shape)}
        found = [shape for shape in shapes if edges & set(enumerate(shape))]
        return frozenset().union(*(self._of_shape(shape) for shape in found))

    def _of_shape(self, shape: Shape) -> Units:
        return self._noted(lambda: self._runner.rehearse_shape(shape))

    def _noted(self, work: Callable[[], None]) -> Units:
        self._launch.launches.clear()
        with self._products:
            work()
        return frozenset(self._launch.units())


def with_few_layers(arch: Arch) -> Arch:
    """One layer of each kind, and the last one, in which fewer rows attend."""
    kinds = {(layer.kind, layer.ratio, layer.router): layer for layer in reversed(arch.layers)}
    indices = {layer.index for layer in kinds.values()} | {arch.layers[-1].index}
    return replace(arch, layers=tuple(x for x in arch.layers if x.index in indices))


def covering_steps(
    room: Room, units_of: Callable[[Step], Units], borders: Sequence[int] = ()
) -> tuple[list[Step], Units]:
    """Steps that together compile what any step of the room would but for sampling, and that.

    Args:
        borders: as of `Paper`; on either side of one is a step.
    """
    known: set[Any] = set()
    kept = []
    for family in families(room):
        for step, units in _visited(family, units_of, borders):
            if not units <= known:
                known |= units
                kept.append(step)
    return kept, frozenset(known)


def _visited(
    family: Family, units_of: Callable[[Step], Units], borders: Sequence[int]
) -> Iterator[tuple[Step, Units]]:
    """Steps of a family at powers of two and borders, and where those differ, halfway between them,
    and there again as long as something new is found."""
    seen: dict[int, Units] = {}

    def look(size: int) -> Iterator[tuple[Step, Units]]:
        if size not in seen:
            step = family.make(size)
            seen[size] = units_of(step)
            yield step, seen[size]

    def between(low: int, high: int) -> Iterator[tuple[Step, Units]]:
        middle = (low + high) // 2
        if middle == low or seen[low] == seen[high]:
            return
        yield from look(middle)
        if not seen[middle] <= seen[low] | seen[high]:
            yield from between(low, middle)
            yield from between(middle, high)

    beside = {end + more - family.beside for end in borders for more in (0, 1)}
    sizes = sorted({*powers_up_to(family.most), *(n for n in beside if 0 < n <= family.most)})
    for size in sizes:
        yield from look(size)
    for low, high in pairwise(sizes):
        yield from between(low, high)


def powers_up_to(most: int) -> Iterable[int]:
    """1, 2, 4, .. and `most`."""
    return [*(2**n for n in range(most.bit_length()) if 2**n < most), most]
