"""From a plan of several ranks to their processes, which load while this one does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metainfer.arch.record import Arch
from metainfer.comm.group import DEADLINE_S
from metainfer.comm.world import World
from metainfer.core.errors import MetainferError
from metainfer.core.log import form_in_force
from metainfer.hardware.binding import cpus_of_ranks
from metainfer.hardware.device_names import gpu_number
from metainfer.hardware.machine import Machine
from metainfer.kernels.tuned import Tuned
from metainfer.llm.meeting import HostMeeting, StandingGroup
from metainfer.llm.rank_crew import RankCrew
from metainfer.llm.rank_orders import Start
from metainfer.llm.ranks import GroupRunner
from metainfer.llm.restarts import Restarts
from metainfer.llm.runner import Runner
from metainfer.llm.threads import InOrder, settle_thread
from metainfer.nn.cache import CacheStorage
from metainfer.ops.base import Target
from metainfer.plan.plan import Plan
from metainfer.plan.ranks import rank_gpus
from metainfer.plan.settings import EngineSettings
from metainfer.weights.load import LoadProgress

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the ranks of an engine are made from, again and again.

    Attributes:
        source, settings: as `llm.engine.load_model` takes them.
        target, tuned: what layers bind by.
    """

    machine: Machine
    plan: Plan
    arch: Arch
    source: Path
    settings: EngineSettings
    target: Target
    tuned: Tuned

    @property
    def size(self) -> int:
        return self.plan.ranks

    def cpus(self) -> list[tuple[int, ...]]:
        """Of each rank."""
        first = gpu_number(self.plan.device.value)
        gpus = () if first is None else rank_gpus(self.machine, first, self.size)
        return cpus_of_ranks(self.machine, self.size, gpus)

    def starts(self) -> list[Start]:
        """Of all ranks but the first."""
        cpus, log = self.cpus(), form_in_force()
        return [
            Start(
                rank, self.plan, self.arch, self.source, self.settings, self.target, self.tuned,
                cpus[rank], log,
            )
            for rank in range(1, self.size)
        ]  # fmt: skip


class Ranks:
    """The ranks of an engine beside the one that this process is.

    Attributes:
        group: of this process's rank.
        cpus: that its threads are to be bound to.
        restarts: of all of them.
    """

    def __init__(self, recipe: Recipe, on_progress: LoadProgress | None) -> None:
        """Start them; each loads its part."""
        self.group = StandingGroup(0, recipe.size, recipe.plan.wire_dtype.value)
        self.cpus = recipe.cpus()[0]
        self._recipe = recipe
        self._starts = recipe.starts()
        self._lock = threading.Lock()
        self._ended = False
        self._runner: GroupRunner | None = None
        self.restarts = Restarts(self._start_anew)
        self._world: World | None = None
        self._on_death: Callable[[str], None] | None = None
        self._crew = RankCrew(self._starts, on_progress, self._tell_death)
        ways = recipe.plan.collective_ways
        _log.info("%d ranks load, each its part", recipe.size)
        _log.info("ways of collectives: %s (%s)", ways.value, ways.reason)

    def progress(self, done: int, total: int) -> None:
        """Of this process's rank. Raises where another has failed meanwhile."""
        self._crew.progress(0, done, total)

    def runner(self, own: Runner[CacheStorage]) -> GroupRunner:
        """Of all ranks, once they have loaded. Raises UserError, RankLostError."""
        self._crew.loaded()
        on_cpu = self._recipe.plan.device.value == "cpu"
        stages, apart = self._recipe.plan.pipeline_parallel_size.value, None
        if stages > 1 and on_cpu:
            apart = InOrder(lambda: settle_thread(self._recipe.plan, self.cpus))
        self._runner = GroupRunner(
            own,
            self.group,
            self._crew,
            self._meeting,
            stages=stages,
            apart=apart,
            may_meet_again=on_cpu,
        )
        return self._runner

    def on_death(self, tell: Callable[[str], None]) -> None:
        """`tell` gets a sentence, from another thread, when a rank has ended by itself."""
        self._on_death = tell
        if self._crew.death is not None:
            tell(self._crew.death)

    def end(self) -> None:
        """End their processes. May be called again, and from any thread."""
        self.restarts.end()
        with self._lock:
            self._ended = True
            crew = self._crew
        crew.end()
        self.group.close()
        if self._world is not None:
            self._world.close()

    def _start_anew(self) -> None:
        """Raises as `runner` does."""
        assert self._runner is not None
        self._crew.end()
        with self._lock:
            if self._ended:
                raise MetainferError("the engine is closed")
            self._crew = RankCrew(self._starts, None, self._tell_death)
        settle_thread(self._recipe.plan)
        self._crew.loaded()
        self._runner.renew(self._crew)

    def _meeting(self) -> HostMeeting:
        if self._world is not None:
            self._world.close()
        self._world = World(self._recipe.size, deadline_s=DEADLINE_S)
        return HostMeeting.of(self._recipe.plan, self._world)

    def _tell_death(self, sentence: str) -> None:
        if self._on_death is not None:
            self._on_death(sentence)
