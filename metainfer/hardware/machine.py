"""Machine: what the probe learnt of the machine, as a record that goes through JSON and back.

What could not be learnt is `Unknown` and says why; nothing is guessed. A plan can be made from a
recorded machine anywhere.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from metainfer.core.errors import UserError

MACHINE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Unknown:
    """A fact that could not be learnt, and why, in a few words."""

    why: str


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor, as far as this process may use it.

    Attributes:
        model: as it calls itself.
        physical_cores, logical_cores: those that affinity and quota leave to this process, at
            least 1.
        quota_cores: processor time that a cgroup grants, in cores; None without a limit.
        isa: extensions that matter to matrix products, such as "avx512_bf16", sorted.
    """

    model: str | Unknown
    physical_cores: int
    logical_cores: int
    quota_cores: float | None
    isa: tuple[str, ...] | Unknown


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory in bytes, as far as this process may use it.

    Attributes:
        total_bytes: of the machine, or the limit where that is less.
        available_bytes: what may still be taken without swapping.
        limit_bytes: what a cgroup grants in all; None where that is no less than the machine has.
    """

    total_bytes: int | Unknown
    available_bytes: int | Unknown
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator.

    Attributes:
        capability: compute capability, such as (9, 0).
        memory_bytes, free_bytes: of the device, and not in use when it was asked.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """One host.

    Attributes:
        system: operating system, release and architecture.
        gpus: in the order of the driver; () only where the driver lists none.
        driver: version of the GPU driver.
        versions: of Python and of the packages that a result depends on, by name.
    """

    system: str
    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...] | Unknown
    driver: str | Unknown
    versions: Mapping[str, str]

    def to_json(self) -> str:
        return json.dumps({"version": MACHINE_VERSION, **_plain(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Raises UserError naming what is unknown, missing, of a wrong type or another version."""
        try:
            record = json.loads(text)
        except ValueError as error:
            raise UserError("the machine is not a JSON record", hint=str(error)) from error
        if not isinstance(record, dict):
            raise UserError("the machine is not a JSON record")
        version = record.pop("version", None)
        if version != MACHINE_VERSION:
            raise UserError(f"the machine has version {version}, this one reads {MACHINE_VERSION}")
        machine: Machine = _record(cls, record, "")
        return machine


def _plain(value: Any) -> Any:
    """Records as objects, Unknown as {"unknown": why}."""
    if isinstance(value, Unknown):
        return {"unknown": value.why}
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _record(cls: type, plain: Mapping[str, Any], path: str) -> Any:
    """The record of type `cls` from its plain form; `path` says where it stands."""
    hints = typing.get_type_hints(cls)
    names = {f.name for f in fields(cls)}
    for word, odd in (("unknown", set(plain) - names), ("missing", names - set(plain))):
        if odd:
            listed = ", ".join(sorted(path + name for name in odd))
            raise UserError(f"{word} machine fields: {listed}")
    return cls(**{name: _value(hints[name], plain[name], path + name) for name in plain})


def _value(hint: Any, plain: Any, path: str) -> Any:
    """The value of type `hint` from its plain form."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return _one_of(arguments, plain, path)
    if is_dataclass(hint) and isinstance(plain, dict):
        return _record(typing.cast(type, hint), plain, f"{path}.")
    if origin is tuple and isinstance(plain, list):
        kinds = arguments[:1] * len(plain) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(plain):
            items = enumerate(zip(kinds, plain, strict=True))
            return tuple(_value(kind, item, f"{path}[{n}]") for n, (kind, item) in items)
    if origin is Mapping and isinstance(plain, dict):
        return {key: _value(arguments[1], item, f"{path}.{key}") for key, item in plain.items()}
    if type(plain) is not hint and not (hint is float and type(plain) is int):
        raise UserError(f"machine field {path} is {plain!r}, which is not what stands there")
    return plain


def _one_of(kinds: tuple[Any, ...], plain: Any, path: str) -> Any:
    """A value of the first of `kinds`, or where they are among them None and Unknown."""
    if plain is None and type(None) in kinds:
        return None
    if Unknown in kinds and isinstance(plain, dict) and set(plain) == {"unknown"}:
        return Unknown(_value(str, plain["unknown"], f"{path}.unknown"))
    return _value(kinds[0], plain, path)
