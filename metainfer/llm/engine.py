"""Engine: a checkpoint, loaded and running in a thread of this process.

`Engine.load` is the way from a directory to a client: probe, Arch, Plan, checked files, model,
cache, dry run, loop. Knows nothing of text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from metainfer.arch.families import known_names, read_arch
from metainfer.arch.record import Arch
from metainfer.core.errors import UserError
from metainfer.core.events import EngineEvent
from metainfer.core.units import format_seconds
from metainfer.hardware.device_names import gpu_number
from metainfer.hardware.machine import Machine
from metainfer.hardware.measured import with_measured
from metainfer.hardware.probe import probe
from metainfer.kernels.builtin import builtin_registry
from metainfer.kernels.gpu.compilations import Compilations
from metainfer.kernels.platform import launcher
from metainfer.kernels.registry import Kernel, Registry
from metainfer.kernels.tune_record import find_here
from metainfer.llm.admission import Limits
from metainfer.llm.ahead import steps_ahead
from metainfer.llm.client import EngineStats
from metainfer.llm.loop import Executor, Loop
from metainfer.llm.make_runner import make_runner
from metainfer.llm.open_weights import open_weights, say_loaded
from metainfer.llm.policy import Policies, TimeShare
from metainfer.llm.ranks import GroupRunner
from metainfer.llm.request import Request
from metainfer.llm.runner import Runner
from metainfer.llm.scheduler import Scheduler
from metainfer.llm.start_ranks import Ranks, Recipe
from metainfer.llm.step import Step
from metainfer.llm.threads import begun, in_a_thread, settle_thread
from metainfer.llm.warmup import warm_up
from metainfer.nn.cache import CacheStorage
from metainfer.ops.base import Target
from metainfer.plan.build import build_plan, choose_target
from metainfer.plan.formats import terms_here
from metainfer.plan.plan import Plan
from metainfer.plan.plan_file import settle
from metainfer.plan.proof import CacheProof, cache_proof, too_short
from metainfer.plan.settings import EngineSettings, LoadFormat
from metainfer.plan.wire_proof import WireProof, wire_proof
from metainfer.weights.load import LoadProgress

_log = logging.getLogger(__name__)


class Engine:
    """An EngineClient over a loop in a thread of its own. Close it when done.

    Args:
        executor: runs the steps, in the engine thread alone.
        observed: values of `EngineStats` that are not the scheduler's, by name.
        cpus: that the engine's thread is bound to; none for all.
        revive: as of `Loop`.
        on_close: called at the end, when nothing runs any more; may be called again.
        check_every_step: for tests: the scheduler's books are checked after every step.

    Attributes:
        machine, arch, plan: what it runs on, what it runs, and how.
        kernels: every op that a layer or the sampler bound, with its backend.
        limits: what a request must keep to.
    """

    def __init__(
        self,
        machine: Machine,
        arch: Arch,
        plan: Plan,
        executor: Executor,
        *,
        kernels: Sequence[Kernel] = (),
        observed: Callable[[], Mapping[str, Any]] = dict,
        revive: Callable[[str], None] | None = None,
        on_close: Callable[[], None] = lambda: None,
        cpus: Sequence[int] = (),
        check_every_step: bool = False,
    ) -> None:
        self.machine = machine
        self.arch = arch
        self.plan = plan
        self.kernels = tuple(kernels)
        self.limits = limits_of(arch, plan)
        self._observed = observed
        self._on_close = on_close
        self._cpus = tuple(cpus)
        pace = TimeShare(plan.decode_share.value, plan.longest_prefill_s.value)
        self._loop = Loop(
            Scheduler(self.limits, Policies(pace=pace)),
            executor,
            revive=revive,
            ahead=plan.steps_ahead,
            check_every_step=check_every_step,
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        directory: str | Path,
        settings: EngineSettings | None = None,
        on_progress: LoadProgress | None = None,
        *,
        on_plan: Callable[[Machine, Plan], None] | None = None,
        check_every_step: bool = False,
    ) -> Engine:
        """Load the checkpoint in `directory` and start serving it.

        Args:
            directory: also a known name or a directory that holds config.json alone, where the
                weights are drawn at random (`EngineSettings.load_format`).
            on_progress: called with (bytes of weights loaded, bytes in all).
            on_plan: called once it is clear how the model will run, before anything is loaded.

        Raises:
            UserError: there is no such model, flags contradict each other or it does not fit.
            CheckpointError: listing everything that is wrong with the files.
        """
        loaded = load_model(directory, settings, on_progress, on_plan=on_plan)
        return cls.start(loaded, check_every_step=check_every_step)

    @classmethod
    def start(cls, loaded: LoadedModel, *, check_every_step: bool = False) -> Engine:
        """Warm a model up and serve it. Raises what the model raises."""
        plan, runner, compilations = loaded.plan, loaded.runner, loaded.compilations
        try:
            found = loaded.steps_ahead.result()
            in_a_thread(plan, lambda: warm_up(runner, plan, found), loaded.cpus)
        except BaseException:
            loaded.close()
            raise
        compilations.begin_service()
        ready_s = time.perf_counter() - loaded.began_s
        _log.info("%s is ready after %s", loaded.arch.name, format_seconds(ready_s))
        engine = cls(
            loaded.machine,
            loaded.arch,
            plan,
            runner,
            kernels=loaded.kernels,
            observed=lambda: {
                "kernels_compiled": compilations.in_service,
                "decodes_without_graph": runner.decodes_without_graph,
                "restarts": 0 if loaded.ranks is None else loaded.ranks.restarts.count,
            },
            revive=None if loaded.ranks is None else loaded.ranks.restarts,
            on_close=loaded.close,
            cpus=loaded.cpus,
            check_every_step=check_every_step,
        )
        loaded.on_death(engine._loop.lose)
        return engine

    # ---- EngineClient ----

    def submit(self, request: Request) -> None:
        self._loop.submit(request)

    def abort(self, request_id: str) -> None:
        self._loop.abort(request_id)

    def events(self, timeout_s: float | None = None) -> Sequence[EngineEvent]:
        return self._loop.events(timeout_s)

    def stats(self) -> EngineStats:
        return replace(self._loop.stats(), **self._observed())

    # ---- the end ----

    def close(self) -> None:
        """End after the current step; requests that are not done are aborted. May be called again,
        and from any thread."""
        self._loop.close()
        self._thread.join()  # behind the step at hand
        self._on_close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        settle_thread(self.plan, self._cpus)
        self._loop.run()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory with its cache, and who runs it; nothing is warmed up.

    Attributes:
        kernels: every op that a layer or the sampler bound, with its backend.
        steps_ahead: steps that start all kernels for GPUs, whose code is compiled meanwhile.
        began_s: `time.perf_counter()` when loading began.
        ranks: beside this process's own; None where there are none.
    """

    machine: Machine
    arch: Arch
    plan: Plan
    kernels: tuple[Kernel, ...]
    runner: Runner[CacheStorage] | GroupRunner
    compilations: Compilations
    steps_ahead: Future[list[Step]]
    began_s: float
    ranks: Ranks | None = None

    @property
    def cpus(self) -> tuple[int, ...]:
        """That threads which run it are bound to; () for all."""
        return () if self.ranks is None else self.ranks.cpus

    def on_death(self, tell: Callable[[str], None]) -> None:
        """`tell` gets a sentence, from another thread, should a rank end by itself."""
        if self.ranks is not None:
            self.ranks.on_death(tell)

    def close(self) -> None:
        """End the processes of other ranks. May be called again."""
        if self.ranks is not None:
            self.ranks.end()


def load_model(
    directory: str | Path,
    settings: EngineSettings | None = None,
    on_progress: LoadProgress | None = None,
    *,
    on_plan: Callable[[Machine, Plan], None] | None = None,
    watched: Callable[[Registry], Registry] | None = None,
) -> LoadedModel:
    """What `Engine.load` does before `Engine.start`.

    Args:
        watched: makes the registry that layers bind from out of the machine's own; it must choose
            the same backends.

    Raises UserError, CheckpointError: as `Engine.load`.
    """
    began_s = time.perf_counter()
    settings = settings or EngineSettings()
    directory = model_source(directory, settings)
    arch = read_arch(directory, settings.hf_overrides)
    compilations = Compilations()
    launch = launcher(settings.code_for, compilations)
    machine, registry = with_measured(probe()), builtin_registry(launch)
    settled = settle(settings, arch, machine)
    settings = settled.settings
    for sentence in settled.warnings:
        _log.warning("%s", sentence)
    with settled.naming():
        capabilities = choose_target(machine, arch, settings, registry.capabilities)
        terms = terms_here(machine, arch, settings, capabilities)
        proof = cache_proof(directory, arch, settings, terms)
        wires = wire_proof(directory, settings, terms)
        target = capabilities.target
        found = find_here(machine, target, gpu_number(settings.device or ""))
        plan = settled.told(
            build_plan(machine, arch, settings, capabilities, proof, found.tuning(), wires)
        )
    for verdict in (proof, wires):
        if verdict is not None:
            _warn_of_reach(plan, verdict)
    if on_plan is not None:
        on_plan(machine, plan)
    settle_thread(plan)
    if gpu_number(plan.device.value):
        launch = launcher(settings.code_for, compilations)  # whose numbers are that GPU's
        registry = builtin_registry(launch)
    for sentence in found.broken:
        _log.warning("%s", sentence)
    tuned, starts = found.bound(plan, target), launch
    registry = registry.with_tuned(tuned)
    # While weights are read.
    ahead = begun(lambda: steps_ahead(arch, plan, target, starts, tuned))
    bound = registry if watched is None else watched(registry)
    ranks = None
    if plan.ranks > 1:
        recipe = Recipe(machine, plan, arch, directory, settings, target, tuned)
        ranks = Ranks(recipe, on_progress)
    try:
        kernels, runner = _loaded(
            arch, plan, directory, settings, bound, target, on_progress, ranks
        )
    except BaseException:
        if ranks is not None:
            ranks.end()
        raise
    return LoadedModel(machine, arch, plan, kernels, runner, compilations, ahead, began_s, ranks)


def _warn_of_reach(plan: Plan, found: CacheProof | WireProof) -> None:
    """Say once, at the start, which formats rest on much shorter prompts than the plan takes."""
    values = plan.cache_dtype, plan.index_cache_dtype, plan.wire_dtype
    said = too_short(found.longest, plan.max_model_len.value)
    used = [value.value for value in values if value.reason.startswith(found.reason)]
    if said and used:
        _log.warning("%s rests on shorter prompts: %s", " and ".join(dict.fromkeys(used)), said)


def _loaded(
    arch: Arch,
    plan: Plan,
    source: Path,
    settings: EngineSettings,
    registry: Registry,
    target: Target,
    on_progress: LoadProgress | None,
    ranks: Ranks | None,
) -> tuple[tuple[Kernel, ...], Runner[CacheStorage] | GroupRunner]:
    """What this process's rank has bound, and who runs the model on all ranks."""
    tell = on_progress if ranks is None else ranks.progress
    began_s = time.perf_counter()
    with open_weights(source, arch, settings, plan, tell) as checkpoint:
        if checkpoint.unused:
            _log.info("%d tensors of drafting blocks are not used", len(checkpoint.unused))
        group, cpus = (None, ()) if ranks is None else (ranks.group, ranks.cpus)
        kernels, runner = in_a_thread(
            plan,
            lambda: make_runner(arch, plan, checkpoint, registry, target, group=group),
            cpus,
        )
        say_loaded(checkpoint, time.perf_counter() - began_s)
    return kernels, runner if ranks is None else ranks.runner(runner)


def limits_of(arch: Arch, plan: Plan) -> Limits:
    """What the plan allows requests and steps."""
    return Limits(
        vocab_size=arch.vocab_size,
        eos_token_ids=arch.eos_token_ids,
        max_model_len=plan.max_model_len.value,
        max_num_seqs=plan.max_num_seqs.value,
        max_num_batched_tokens=plan.max_num_batched_tokens.value,
        max_queued_requests=plan.max_queued_requests.value,
        num_blocks=plan.num_blocks.value,
        draft_rows=plan.draft_rows.value,
        block_tokens=plan.block_tokens,
        stages=plan.pipeline_parallel_size.value,
    )


def model_source(path: str | Path, settings: EngineSettings) -> Path:
    """Where the model is read from: `path`, which must be a checkpoint directory unless weights are
    drawn. Raises UserError saying what it is instead."""
    if settings.load_format == LoadFormat.DUMMY:
        return Path(path)  # `read_arch` says so where there is no config
    return checkpoint_directory(path)


def checkpoint_directory(path: str | Path) -> Path:
    """`path`, if it is a directory. Raises UserError saying what it is instead."""
    directory = Path(path)
    if directory.is_dir():
        return directory
    if directory.is_file():
        raise UserError(
            f"{directory} is a file, not a checkpoint directory",
            hint="give the directory that holds config.json and the safetensors files",
        )
    if str(path) in known_names():
        read_arch(path)  # says so where the model is not served
        raise UserError(
            f"'{path}' is the name of a known model, not a checkpoint: its weights are not here",
            hint="give the directory of its checkpoint; --load-format dummy runs it with random"
            " weights, which `metainfer weights synth` writes to a disk",
        )
    raise UserError(
        f"there is no checkpoint directory at '{path}'", hint="give the directory of a checkpoint"
    )
