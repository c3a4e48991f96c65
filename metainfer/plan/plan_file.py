"""A file of `metainfer plan -o` as settings of an engine: `--plan`.

The layout that it chose is taken as it is: flags that divide the model otherwise contradict it. Its
lengths, counts and formats stand in for flags that are not given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from metainfer.arch.record import Arch
from metainfer.arch.shape_of import shape_of_v4
from metainfer.arch.shapes import shape_key
from metainfer.core.config import flags_of
from metainfer.core.errors import MetainferError, UserError
from metainfer.hardware.machine import Machine, gpus_of
from metainfer.hardware.topology import fingerprint
from metainfer.plan.layout_flags import axes_of, has_flag, not_done, not_run, sizes_of, words_of
from metainfer.plan.layouts import Formats, Layout, Layouts
from metainfer.plan.plan import Origin, Plan
from metainfer.plan.search_record import KIND, RECORD_VERSION
from metainfer.plan.settings import EngineSettings

_MOST_BYTES = 64 * 10**6
_PLAN_NAMES = {"kv_cache_dtype": "cache_dtype"}
"""Settings that a plan calls otherwise."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """Attributes:
    path: as it was given.
    model, model_key: the name of its model, and what tells models apart (`arch.shapes.shape_key`).
    gpus, fingerprint: of its machine.
    engine: whose efficiency was assumed.
    sizes: fields of EngineSettings beside the layout.
    """

    path: str
    model: str
    model_key: str
    gpus: tuple[str, ...]
    fingerprint: str
    engine: str
    layouts: Layouts
    formats: Formats
    sizes: Mapping[str, Any]

    @property
    def machine_text(self) -> str:
        """Such as "8 x NVIDIA RTX PRO 6000"."""
        names = " and ".join(dict.fromkeys(self.gpus))
        return f"{len(self.gpus)} x {names}"


@dataclass(frozen=True, slots=True)
class Settled:
    """Attributes:
    settings: with what the file says; itself names none any more.
    source: the file; "" for none.
    taken: fields of the settings whose values are the file's.
    warnings: sentences.
    """

    settings: EngineSettings
    source: str = ""
    taken: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def told(self, plan: Plan) -> Plan:
        """The plan that was built, where values name the file that they are from."""
        names = {_PLAN_NAMES.get(name, name) for name in self.taken}
        reason = f"of the plan in {self.source}"
        return replace(
            plan,
            **{
                name: replace(value, origin=Origin.FILE, reason=reason)
                for name, value in plan.items()
                if name in names and value.origin is Origin.FLAG
            },
        )

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors say which of the flags that they may name are the file's."""
        try:
            yield
        except UserError as error:
            flags = " ".join(words_of(self.taken))
            if not flags:
                raise
            raise UserError(f"{error.message} ({self.source}: {flags})", error.hint) from error


def settle(settings: EngineSettings, arch: Arch, machine: Machine) -> Settled:
    """Settings with what the file of `--plan` says, if one is named.

    Raises UserError: it is no such file, is about another model, flags contradict its layout, or
    this version does not run it.
    """
    if settings.plan is None:
        return Settled(settings)
    file = read_plan_file(settings.plan)
    model = _check_model(file, arch)
    _check_layout(file)
    axes = {name: value for name, value in axes_of(file.layouts).items() if has_flag(name)}
    for name, value in axes.items():
        _check_axis(file, name, value, getattr(settings, name))
    taken = {
        name: value
        for name, value in {**axes, **file.sizes}.items()
        if getattr(settings, name) is None
    }
    warnings = (*model, *_of_machine(file, machine), *_of_engine(file))
    return Settled(replace(settings, **taken, plan=None), file.path, taken, warnings)


def read_plan_file(path: str) -> PlanFile:
    """Raises UserError naming the file and what is wrong with it."""
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES / 1e6:.0f} MB")
        record = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        if not isinstance(record, dict):
            raise ValueError("it holds no object")
    except OSError as error:
        raise UserError(f"--plan: {path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--plan: {path} is not a JSON record", hint=str(error)) from error
    if record.get("kind") != KIND:
        kind = record.get("kind") or ("an engine's plan" if "values" in record else "unknown")
        raise UserError(
            f"--plan: {path} holds no layout plan (kind: {kind})",
            hint="`metainfer plan MODEL -o FILE` writes one",
        )
    if record.get("version") != RECORD_VERSION:
        raise UserError(
            f"--plan: {path} has version {record.get('version')}, this engine reads"
            f" {RECORD_VERSION}",
            hint="`metainfer plan MODEL -o FILE` writes it anew",
        )
    try:
        return _read(path, record)
    except (KeyError, TypeError, ValueError, MetainferError) as error:
        raise UserError(
            f"--plan: {path} is not as `metainfer plan` writes it ({error})",
            hint="`metainfer plan MODEL -o FILE` writes it anew",
        ) from error


def _read(path: str, record: Mapping[str, Any]) -> PlanFile:
    chosen, workload = record["chosen"], record["workload"]
    layouts = Layouts(Layout(**chosen["prefill"]), Layout(**chosen["decode"]))
    formats = Formats(**chosen["formats"])
    requests = -(-workload["requests_at_once"] // layouts.decode.replicas)
    return PlanFile(
        path=path,
        model=record["model"],
        model_key=record.get("model_key", ""),
        gpus=tuple(record["machine"]["gpus"]),
        fingerprint=record["machine"]["fingerprint"],
        engine=record["engine"],
        layouts=layouts,
        formats=formats,
        sizes=sizes_of(formats, workload["longest_context"], requests),
    )


def _check_model(file: PlanFile, arch: Arch) -> list[str]:
    """Warnings. Two names may be of one model, and one name of a model that was cut short."""
    if file.model_key == shape_key(shape_of_v4(arch)):
        return []
    if file.model.casefold() != arch.name.casefold():
        raise UserError(
            f"--plan: {file.path} is a plan for {file.model}, and the model is {arch.name}",
            hint=f"`metainfer plan MODEL -o {file.path}` plans for it",
        )
    return [
        f"{file.path} was made for {file.model} with another config, or by another version: what it"
        " predicts of memory and time may not hold"
    ]


def _check_layout(file: PlanFile) -> None:
    replicas = file.layouts.decode.replicas
    if replicas > 1:
        raise UserError(
            f"--plan: {file.path} plans {replicas} replicas ({file.layouts.name}), and a server is"
            " one of them",
            hint=f"print the command of each server with `metainfer plan {file.model} --emit"
            " metainfer`",
        )
    unable = next(not_run(file.layouts), None)
    if unable is not None:
        raise UserError(
            f"--plan: {file.path} plans {unable} ({file.layouts.name})",
            hint=f"print the nearest that serves with `metainfer plan {file.model} --emit"
            " metainfer`",
        )


def _check_axis(file: PlanFile, name: str, value: int, given: int | None) -> None:
    if given not in (None, value):
        flag = next(b.flag.name for b in flags_of(EngineSettings) if b.field_name == name)
        raise UserError(
            f"{flag} {given} contradicts the layout of {file.path}, which is {file.layouts.name}",
            hint="leave one of the two out",
        )


def _of_machine(file: PlanFile, machine: Machine) -> Iterator[str]:
    if file.fingerprint == fingerprint(machine):
        return
    gpus = gpus_of(machine)
    if tuple(gpu.name for gpu in gpus) == file.gpus:
        differs = "with other links, host or driver than this one"
    else:
        differs = "which this machine is not"
    yield (
        f"{file.path} was made for {file.machine_text}, {differs}: its layout is kept, what it"
        " predicts may not hold"
    )


def _of_engine(file: PlanFile) -> Iterator[str]:
    for sentence in not_done(file.formats):
        yield f"{file.path} plans {sentence}"
    if file.engine != "metainfer":
        yield f"{file.path} assumes the efficiency of {file.engine}"
