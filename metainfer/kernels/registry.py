"""Registry: which implementation of an op runs, and why not a better one.

An op has one contract (`ops`) and any number of backends. A backend says of a case and a target,
without running anything, whether it serves them, and if not, why. Layers bind an op once, when
they are built; `explain` lists every verdict. The first in order that serves a case is the default;
where `metainfer kernels tune` measured this card (`tuned`), the fastest that the order allows runs,
which may depend on the rows of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from metainfer.core.errors import MetainferError, UserError
from metainfer.kernels.by_rows import by_rows, from_held
from metainfer.kernels.tuned import UNTUNED, Choice, Part, Tuned, backend_of, choose, told_rows
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
class Variant:
    """Another way in which a backend runs, from the same weights: other tiles.

    Attributes:
        run: as of the backend.
        most_rows: calls of more rows it runs as the backend does; None where it differs in all.
    """

    run: Callable[..., Any]
    most_rows: int | None = None


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
        holds: backends that can run from weights as this one prepares them, and how they are found
            in them. Those with the same `prepare` need not be named.
        variants: by name; taken only where they were measured.
    """

    op: str
    name: str
    run: Callable[..., Any]
    eligible: Callable[[Any, Target], Verdict] = always
    prepare: Callable[..., Any] | None = None
    expands: bool = False
    holds: Mapping[str, Callable[[Any], Any]] = field(default_factory=lambda: _NOTHING)
    variants: Mapping[str, Variant] = field(default_factory=lambda: _NOTHING)


_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Kernel:
    """A backend bound to a case. `run` and `prepare` take the arguments after the case.

    Attributes:
        backend: what runs calls of many rows, and prepares weights so that all parts can run.
        parts: what runs calls of how many rows, where that is not one backend for all.
        why: who chose it, in a few words.
    """

    op: str
    backend: str
    case: Any
    run: Callable[..., Any]
    prepare: Callable[..., Any]
    parts: tuple[Part, ...] = ()
    why: str = ""

    @property
    def backends(self) -> tuple[str, ...]:
        """All that run it."""
        return tuple(dict.fromkeys((self.backend, *(backend_of(p.candidate) for p in self.parts))))

    @property
    def runs_on(self) -> str:
        """The backend, or as "triton to 64 rows, then torch"."""
        return told_parts(self.parts) if self.parts else self.backend


def told_parts(parts: tuple[Part, ...]) -> str:
    """ "triton to 64 rows, then torch"."""
    return ", then ".join(
        part.candidate + ("" if part.most_rows is None else f" to {told_rows(part.most_rows)}")
        for part in parts
    )


class Registry:
    """All backends; immutable.

    Attributes:
        tuned: what was measured here.
    """

    def __init__(self, backends: Iterable[Backend], tuned: Tuned = UNTUNED) -> None:
        self.tuned = tuned
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

    def with_tuned(self, tuned: Tuned) -> Registry:
        """The same backends, chosen by what was measured."""
        return Registry((one for by in self._table.values() for one in by.values()), tuned)

    def candidate(self, op: str, name: str) -> Backend:
        """A backend, or one of its variants, which runs as "backend:variant"."""
        backend = self._table[op][backend_of(name)]
        variant = name.partition(":")[2]
        return replace(backend, run=backend.variants[variant].run) if variant else backend

    def candidates(self, op: str, case: Any, target: Target, order: str = "") -> tuple[str, ...]:
        """All that could be chosen: backends of the order that serve `case`, the default first, and
        their variants. References are what others are held against."""
        serving = self._serving(op, case, target, order)
        names = [name for name in serving if name != REFERENCE]
        return tuple(
            candidate
            for name in names
            for candidate in (name, *(f"{name}:{more}" for more in self._table[op][name].variants))
        )

    def bind(self, op: str, case: Any, target: Target, order: str = "") -> Kernel:
        """What `choose` says.

        Args:
            order: the plan's `kernel_order`: "op=backend,backend;op=..." with "*" for all ops that
                are not named; "" for the default order of the target.

        Raises:
            UserError: the order names what does not exist, or no backend of the order serves the
                case; the message holds every verdict.
        """
        choice = self.choose(op, case, target, order)
        if choice is None:
            verdicts = "; ".join(
                f"{name}: {verdict.reason}"
                for name, verdict in self.explain(op, case, target, order)
            )
            raise UserError(
                f"nothing that the plan allows runs {op} on {target} for {case} ({verdicts})",
                hint=f"name a backend in the kernel order, such as {op}={REFERENCE} for the slow"
                " one",
            )
        return self._kernel(op, case, choice)

    def choose(self, op: str, case: Any, target: Target, order: str = "") -> Choice | None:
        """The first backend in order that serves `case` on `target`, or what was measured to be
        faster. None where nothing in order serves it. Raises UserError for an unknown order."""
        serving = self._serving(op, case, target, order)
        if not serving:
            return None
        found = self.tuned.of(op, case, target)
        if found is not None:
            choice = choose(found, serving, lambda holder: self._runs_from(op, holder, serving))
            if choice is not None:
                return choice
        return Choice((Part(serving[0]),), self.tuned.why_not(op, case, target))

    def _serving(self, op: str, case: Any, target: Target, order: str) -> list[str]:
        """Backends that may run a case, the default first; those with expanded weights or those
        without, as the default is: the plan counted their bytes."""
        names = self._candidates(op, target, order)
        serving = [name for name in names if self.verdict(op, name, case, target)]
        return [
            name
            for name in serving
            if self._table[op][name].expands == self._table[op][serving[0]].expands
        ]

    def verdict(self, op: str, name: str, case: Any, target: Target) -> Verdict:
        """Whether a backend serves a case: it says so, and is not known to be wrong."""
        said = self._table[op][name].eligible(case, target)
        bad = self.tuned.bad(op, case, target).get(name)
        return no(f"known bad on this card: {bad}") if said and bad else said

    def _runs_from(self, op: str, holder: str, names: Iterable[str]) -> frozenset[str]:
        """Those of `names` that can run from the weights as `holder` prepares them."""
        kept = self._table[op][holder]
        return frozenset(
            name
            for name in names
            if name == holder
            or not OPS[op].weights
            or name in kept.holds
            or self._table[op][name].prepare is kept.prepare
        )

    def _kernel(self, op: str, case: Any, choice: Choice) -> Kernel:
        holder = self._table[op][choice.holder or backend_of(choice.parts[-1].candidate)]
        prepare = holder.prepare or _nothing_to_prepare
        weighted = bool(OPS[op].weights)
        runs: list[tuple[int | None, Callable[..., Any]]] = []
        for part in choice.parts:
            found = self.candidate(op, part.candidate)
            view = holder.holds.get(found.name) if weighted else None
            one = partial(found.run, case)
            runs.append((part.most_rows, one if view is None else from_held(one, view)))
        run = runs[0][1] if len(runs) == 1 else by_rows(op, weighted, runs)
        last = backend_of(choice.parts[-1].candidate)
        told = choice.parts if len(runs) > 1 or choice.parts[-1].candidate != last else ()
        return Kernel(op, last, case, run, partial(prepare, case), told, choice.why)

    def explain(
        self, op: str, case: Any, target: Target, order: str = ""
    ) -> tuple[tuple[str, Verdict], ...]:
        """Every backend of `op` with its verdict, those of the order first."""
        candidates = self._candidates(op, target, order)
        verdicts = [(name, self.verdict(op, name, case, target)) for name in candidates]
        for name in self._table[op]:
            if name not in candidates:
                verdict = self.verdict(op, name, case, target)
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
