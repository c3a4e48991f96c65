"""The steps of a commissioning: which verb each is, with which flags, and when it is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from metainfer.arch.families import read_arch
from metainfer.bench.comm_settings import CommLoad
from metainfer.bench.stage import TUNED
from metainfer.bench.stages_settings import BenchResults, StagesLoad
from metainfer.cli import bench_comm, bench_stages, kernels_tune, plan, probe, verify
from metainfer.cli.step_process import Job
from metainfer.core.errors import UserError
from metainfer.hardware.machine import Machine, Unknown
from metainfer.plan.choices import NO_FLAGS
from metainfer.plan.layout_flags import axes_of, not_run
from metainfer.plan.layouts import Layouts
from metainfer.plan.plan_file import read_plan_file
from metainfer.plan.settings import EngineSettings, LoadFormat
from metainfer.plan.workload import Workload
from metainfer.shipped import model_dir

PLAN_FILE = "plan.json"
LAYERS = 4
"""Of a model that is too large to load again and again: its first ones, at full width, with random
weights."""

_SMALL_BYTES = 16 * 2**30
"""Of a checkpoint that is loaded as it is."""
_GRACE_S = 300.0
"""Behind its share, in which a step may end what it had begun: a kernel may take minutes to compile
and a model to load."""
_BRIEF_S = 120.0
"""A share below which stages do little, so that they do it more than once."""
_PROMPTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"cuda": (1024, 8192), "cpu": (256, 1024)}
)
_BATCHES: Mapping[str, tuple[int, ...]] = MappingProxyType({"cuda": (1, 8, 32), "cpu": (1, 8)})
_COMM_RANKS, _COMM_BYTES = 2, 4 * 2**20


@dataclass(frozen=True, slots=True)
class Asked:
    """What is commissioned.

    Attributes:
        model: as it was named.
        workload: that is planned for; None for the usual one.
        directory: of all files.
        machine: at hand.
    """

    model: str
    workload: Workload | None
    objective: str
    device: str | None
    directory: Path
    machine: Machine

    @property
    def on_gpu(self) -> bool:
        gpus = self.machine.gpus
        return self.device != "cpu" and not isinstance(gpus, Unknown) and bool(gpus)

    @property
    def small(self) -> bool:
        """The model lies here and is loaded as it is."""
        files = list(Path(model_dir(self.model)).glob("*.safetensors"))
        return bool(files) and sum(file.stat().st_size for file in files) <= _SMALL_BYTES

    def layouts(self) -> Layouts | None:
        """As planned; None without a plan."""
        path = self.directory / PLAN_FILE
        return read_plan_file(str(path)).layouts if path.is_file() else None

    @property
    def tensor_ranks(self) -> int:
        layouts = self.layouts()
        return 1 if layouts is None else axes_of(layouts)["tensor_parallel_size"]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Why a step is not done here, a sentence."""

    why: str


@dataclass(frozen=True, slots=True)
class Step:
    """Attributes:
    name: short.
    title: what it does.
    weight: of its share of the time, beside the others.
    file: that it writes.
    job: what is to be done within its share in seconds, made when its turn comes.
    note: what is said of it where it is done, "" for nothing.
    unreached: of its record, what there was no time for, where the verb ends well all the same;
        "" for nothing.
    """

    name: str
    title: str
    weight: float
    file: str
    job: Callable[[Asked, float], Job | LeftOut]
    note: Callable[[Asked], str] = lambda asked: ""
    unreached: Callable[[Mapping[str, Any]], str] = lambda record: ""


def _probe(asked: Asked, share_s: float) -> Job:
    return _job(probe.run, share_s, probe.ProbeOptions(out=asked.directory / "machine.json"))


def _communication(asked: Asked, share_s: float) -> Job:
    """Of the GPUs, or, without one, of processes on the CPU."""
    file = "communication.json"
    if asked.on_gpu:
        options = probe.ProbeOptions(out=asked.directory / file, measure=True)
        return _job(probe.run, share_s, options)
    load = CommLoad(ranks=_COMM_RANKS, max_bytes=_COMM_BYTES, rounds=3, budget_s=share_s)
    return _job(bench_comm.run, share_s, load, BenchResults(True, asked.directory, file))


def _plan(asked: Asked, share_s: float) -> Job | LeftOut:
    """Of the machine at hand, with what was measured of it and what this process sees of it."""
    if not asked.on_gpu:
        return LeftOut(f"a plan divides GPUs, and {_no_gpu(asked)}")
    options = plan.PlanOptions(
        model=asked.model,
        workload=asked.workload,
        objective=asked.objective,
        output=asked.directory / PLAN_FILE,
    )
    return _job(plan.run, share_s, options, NO_FLAGS)


def _verify(asked: Asked, share_s: float) -> Job:
    options = verify.VerifyOptions(
        model=asked.model,
        tensor_parallel_size=asked.tensor_ranks,
        device=asked.device,
        budget_s=share_s,
        out=asked.directory / "verify.json",
    )
    return _job(verify.run, share_s, options)


def _tune(asked: Asked, share_s: float) -> Job:
    options = kernels_tune.TuneOptions(
        model=asked.model,
        tensor_parallel_size=asked.tensor_ranks,
        device=asked.device,
        budget_s=share_s,
        out=asked.directory / "tune.json",
    )
    return _job(kernels_tune.run, share_s, options)


def _stages(asked: Asked, share_s: float) -> Job | LeftOut:
    if not asked.on_gpu and not asked.small:
        return LeftOut(f"{Path(asked.model).name} is not here, or too large to be run on a CPU")
    return _bench(asked, share_s, "stages.json", {})


def _ranks(asked: Asked, share_s: float) -> Job | LeftOut:
    layouts = asked.layouts()
    if layouts is None:
        return LeftOut("there is no plan")
    unable = next(not_run(layouts), None)
    if unable is not None:
        return LeftOut(f"planned is {unable}")
    axes: dict[str, Any] = {axis: n for axis, n in axes_of(layouts).items() if n > 1}
    if not axes:
        return LeftOut("the plan has one rank")
    return _bench(asked, share_s, "ranks.json", axes, settings=(TUNED,))


def _bench(
    asked: Asked, share_s: float, file: str, axes: Mapping[str, Any], **load: Any
) -> Job | LeftOut:
    kind = "cuda" if asked.on_gpu else "cpu"
    try:
        longest = read_arch(asked.model).max_model_len
    except UserError as error:
        return LeftOut(error.message)  # its operations are known, and no engine runs it
    lengths = tuple(size for size in _PROMPTS[kind] if size < longest)
    brief = {"rounds": 2, "requests": 0} if share_s < _BRIEF_S else {}
    work = StagesLoad(
        model=asked.model,
        layers=None if asked.small else LAYERS,
        input_lens=(lengths or (longest // 2,))[: 1 if brief else None],
        decode_batches=_BATCHES[kind][: 1 if brief else None],
        budget_s=share_s,
        **{**brief, **load},
    )
    settings = EngineSettings(
        load_format=LoadFormat.AUTO if asked.small else LoadFormat.DUMMY,
        device=asked.device,
    )
    results = BenchResults(True, asked.directory, file)
    return _job(bench_stages.run, share_s, work, replace(settings, **axes), results)


def _job(run: Callable[..., int], share_s: float, *options: Any) -> Job:
    return Job(run, options, share_s + _GRACE_S)


def _sizes_left(record: Mapping[str, Any]) -> str:
    left = len(record.get("sizes_not_reached", ()))
    return f"{left} sizes were not reached" if left else ""


def _rounds_left(record: Mapping[str, Any]) -> str:
    done, asked = record["rounds"], record["load"]["rounds"]
    return f"{done} of {asked} rounds were completed" if done < asked else ""


def _sample(asked: Asked) -> str:
    return "" if asked.small else f"of the first {LAYERS} layers, at full width, random weights"


def _no_gpu(asked: Asked) -> str:
    gpus = asked.machine.gpus
    if isinstance(gpus, Unknown):
        return "none is known here"
    return "--device cpu leaves them alone" if gpus else "the driver lists none"


STEPS = (
    Step("probe", "what the machine is", 2, "machine.json", _probe),
    Step("communication", "how GPUs, or processes, talk", 10, "communication.json",
         _communication, unreached=_sizes_left),
    Step("plan", "the layout that suits it", 2, PLAN_FILE, _plan),
    Step("verify", "every operation of the model against its reference", 24, "verify.json",
         _verify),
    Step("tune", "what runs each operation fastest", 28, "tune.json", _tune),
    Step("stages", "the engine on one device", 24, "stages.json",
         _stages, _sample, _rounds_left),
    Step("ranks", "the engine as it is planned, over ranks", 10, "ranks.json",
         _ranks, _sample, _rounds_left),
)  # fmt: skip
"""In their order: plan goes before what looks at the operations that its ranks run."""
