"""Registry: which implementation of an op runs, and why not a better one.

An op has one contract (`ops`) and any number of backends. A backend says of a case and a target,
without running anything, whether it serves them, and if not, why. Layers bind an op once, when
they are built; `explain` lists every verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from metainfer.core.errors import MetainferError, UserError
from metainfer.ops.base import Target
from metainfer.ops.capabilities import Capabilities
from metainfer.ops.catalogue import OPS
from metainfer.ops.kernel_order import REFERENCE, allowed, parse_order

# Backends that are tried when the plan names none, by target type. A reference on an accelerator
# is a slow path that nobody asked for, so it must be named.
_DEFAULT_ORDER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("native", "cpu", REFERENCE), "cuda": ("cuda", "triton", "torch")}
)
# Where another backend is surely faster than the first of these: products of many rows in cuBLAS.
_TORCH_FIRST = ("cuda", "torch", "triton")
_ORDER_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cuda": MappingProxyType(
            {
                "linear.dense": _TORCH_FIRST,
                "linear.fp8_rows": _TORCH_FIRST,
                "linear.grouped_fp8_rows": _TORCH_FIRST,
            }
        )
    }
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a backend serves a case on a target; the reason when it does not."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Verdict(True)


def no(reason: str) -> Verdict:
    return Verdict(False, reason)


def always(case: Any, target: Target) -> Verdict:
    """Serves every case everywhere."""
    return YES


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of one op.

    Attributes:
        op, name: of which op, and what it is called.
        run: `run(case, *arguments)`, the arguments as the op's contract lists them. For ops with
            weights the first argument is what `prepare` returned.
        eligible: `eligible(case, target)`, pure.
        prepare: `prepare(case, *weights)`: brings weights into the form that `run` wants, once.
        expands: whether `prepare` turns quantised weights into the compute dtype.
    """

    op: str
    name: str
    run: Callable[..., Any]
    eligible: Callable[[Any, Target], Verdict] = always
    prepare: Callable[..., Any] | None = None
    expands: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A backend bound to a case. `run` and `prepare` take the arguments after the case."""

    op: str
    backend: str
    case: Any
    run: Callable[..., Any]
    prepare: Callable[..., Any]


class Registry:
    """All backends; immutable."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        table: dict[str, dict[str, Backend]] = {name: {} for name in OPS}
        for backend in backends:
            if backend.op not in table:
                raise MetainferError(f"backend {backend.name} is for an unknown op {backend.op}")
            if backend.name in table[backend.op]:
                raise MetainferError(f"{backend.op} has two backends called {backend.name}")
            table[backend.op][backend.name] = backend
        self._table = MappingProxyType({op: MappingProxyType(by) for op, by in table.items()})

    def backends(self, op: str) -> Mapping[str, Backend]:
        """The backends of `op` by name."""
        return self._table[op]

    def bind(self, op: str, case: Any, target: Target, order: str = "") -> Kernel:
        """The first backend in order that serves `case` on `target`.

        Args:
            order: the plan's `kernel_order`: "op=backend,backend;op=..." with "*" for all ops that
                are not named; "" for the default order of the target.

        Raises:
            UserError: the order names what does not exist, or no backend of the order serves the
                case; the message holds every verdict.
        """
        for name in self._candidates(op, target, order):
            backend = self._table[op][name]
            if backend.eligible(case, target):
                prepare = backend.prepare or _nothing_to_prepare
                return Kernel(op, name, case, partial(backend.run, case), partial(prepare, case))
        verdicts = "; ".join(
            f"{name}: {verdict.reason}" for name, verdict in self.explain(op, case, target, order)
        )
        raise UserError(
            f"nothing that the plan allows runs {op} on {target} for {case} ({verdicts})",
            hint=f"name a backend in the kernel order, such as {op}={REFERENCE} for the slow one",
        )

    def explain(
        self, op: str, case: Any, target: Target, order: str = ""
    ) -> tuple[tuple[str, Verdict], ...]:
        """Every backend of `op` with its verdict, those of the order first."""
        candidates = self._candidates(op, target, order)
        verdicts = [(name, self._table[op][name].eligible(case, target)) for name in candidates]
        for name, backend in self._table[op].items():
            if name not in candidates:
                verdict = backend.eligible(case, target)
                verdicts.append((name, no("not in the kernel order") if verdict else verdict))
        return tuple(verdicts)

    def check_order(self, order: str) -> None:
        """Raises UserError naming the unknown op or backend in `order`."""
        self._parse(order)

    def capabilities(self, target: Target) -> Capabilities:
        """The record for the planner."""
        default = _DEFAULT_ORDER.get(target.type, ())
        backends = [backend for by in self._table.values() for backend in by.values()]
        return Capabilities(
            target=target,
            backends=MappingProxyType({op: tuple(by) for op, by in self._table.items()}),
            default_order=default,
            order_of=_ORDER_OF.get(target.type, MappingProxyType({})),
            expanding=frozenset(backend.name for backend in backends if backend.expands),
        )

    def _candidates(self, op: str, target: Target, order: str) -> tuple[str, ...]:
        default = _ORDER_OF.get(target.type, {}).get(op, _DEFAULT_ORDER.get(target.type, ()))
        names = allowed(op, self._parse(order), default)
        return tuple(name for name in names if name in self._table[op])

    def _parse(self, order: str) -> Mapping[str, tuple[str, ...]]:
        return parse_order(order, {op: tuple(by) for op, by in self._table.items()})


def _nothing_to_prepare(case: Any, *weights: Any) -> tuple[Any, ...]:
    return weights
