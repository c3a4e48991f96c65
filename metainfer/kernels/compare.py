"""Whether a backend returns what the reference returns: for tests, verification, benchmarks.

Numbers may differ by the op's tolerance, relative to the largest number expected. Lists of chosen
entries may differ where a rounding decides. Memory that a backend takes with `torch.empty` can be
poisoned, so that a result that was never written shows as NaN (`Poisoned`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from metainfer.kernels.coded import CODES_AT, FEW, NUMBERS, WRITTEN, step
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.reference.formats import decode_index
from metainfer.kernels.registry import Registry
from metainfer.ops.catalogue import OPS

OVERWRITTEN: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "rope.rotate": frozenset({0}),
        "rope.norm_rotate": frozenset({0}),
        "hc.expand": frozenset({0}),
        "hc.expand_mix_fp8": frozenset({0}),
        "moe.swiglu": frozenset({0}),
        "cache.write": frozenset({3}),
        "attention.compress_step": frozenset({3, 8}),
        "cache.write_index": frozenset({4, 5}),
    }
)
"""Arguments that an op may or must overwrite, by place."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Attributes:
    error: largest difference over the largest number expected, of all results; 0 for lists.
    problem: what is wrong, in a few words; "" where nothing is.
    """

    error: float
    problem: str = ""


def run(registry: Registry, op: str, backend: str, case: Any, call: Call) -> tuple[Any, ...]:
    """The results of a backend, or of a variant of one (`Registry.candidate`), as a tuple,
    arguments that it has written last."""
    chosen = registry.candidate(op, backend)
    arguments = call.arguments
    if OPS[op].weights:
        prepare = chosen.prepare
        prepared = prepare(case, *call.weights) if prepare else call.weights
        arguments = (prepared, *arguments)
    result = chosen.run(case, *arguments)
    results = result if isinstance(result, tuple) else (result,)
    written = (call.arguments[place] for place in WRITTEN.get(op, ()))
    return (*results, *(tensor for tensor in written if tensor is not None))


def compare(
    op: str,
    case: Any,
    call: Call,
    actual: tuple[Any, ...],
    expected: tuple[Any, ...],
    exact: bool = False,
) -> Comparison:
    """Results of a backend against those of the reference on one device.

    Args:
        call: the inputs of both.
        exact: lists must be equal, as where the inputs are such that no rounding can decide.
    """
    if len(actual) != len(expected):
        return Comparison(torch.inf, f"{len(actual)} results instead of {len(expected)}")
    for place, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            found = f"{ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}"
            return Comparison(torch.inf, f"result {place} is {found}")
    tolerance = OPS[op].tolerance.of(case.dtype)
    special = None if exact else _SPECIAL.get(op)
    if special is not None:
        return special(case, call, actual, expected, tolerance)
    if op in NUMBERS:
        return _same_codes(op, case, call, actual, expected, tolerance)
    return worst(
        near(ours, theirs, tolerance) for ours, theirs in zip(actual, expected, strict=True)
    )


def near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> Comparison:
    """Differences are small against the largest finite number expected; whole numbers are equal."""
    if not ours.is_floating_point():
        if torch.equal(ours, theirs):
            return Comparison(0.0)
        return Comparison(0.0, f"{int((ours != theirs).sum())} of {ours.numel()} numbers differ")
    if not theirs.numel():
        return Comparison(0.0)
    theirs = theirs.double()
    difference = torch.where(ours == theirs, 0.0, (ours.double() - theirs).abs())
    largest = float(torch.where(theirs.isfinite(), theirs.abs(), 0.0).amax())
    off = float(difference.amax())  # NaN where any is
    error = off / largest if largest else off
    if off <= tolerance * largest:
        return Comparison(error)
    return Comparison(error, f"off by {off:.3g} where the largest is {largest:.3g}")


def worst(comparisons: Any) -> Comparison:
    """The first that has a problem, or the one that is off by most."""
    found = list(comparisons)
    return max(found, key=lambda one: (bool(one.problem), one.error), default=Comparison(0.0))


def _same_codes(
    op: str,
    case: Any,
    call: Call,
    actual: tuple[Any, ...],
    expected: tuple[Any, ...],
    tolerance: float,
) -> Comparison:
    """The numbers that codes stand for: few differ, by a step of their format at most. What a call
    returns beside codes are numbers as any."""
    numbers = (NUMBERS[op](case, call, results) for results in (actual, expected))
    furthest = step(op, case)
    found = []
    for place, (ours, theirs) in enumerate(zip(*numbers, strict=True)):
        coded = furthest if place == CODES_AT.get(op, 0) else 0.0
        one = near(ours, theirs, max(tolerance, coded))
        if coded and not one.problem:
            other = (ours - theirs).abs() > tolerance * theirs.abs()
            differ, few = int(other.sum()), max(FEW * ours.numel(), 2)
            if differ > few:
                one = Comparison(one.error, f"{differ} of {ours.numel()} numbers are other codes")
        found.append(one)
    return worst(found)


def index_scores(case: Any, call: Call, row: int) -> torch.Tensor:
    """float64 [E], the scores of all entries that a row of an indexer's call sees; NaN where they
    are NaN, -inf outside the candidates."""
    q, weights_TH, keys, key_rows, *others, candidates_TB = call.arguments
    if others:
        sequence_T, positions_T = others
        seen = min((int(positions_T[row]) + 1) // case.ratio, key_rows.shape[1])
        rows_E = key_rows[0 if sequence_T is None else sequence_T[row], :seen]
    else:
        rows_E = key_rows[row][key_rows[row] >= 0]
    keys_EI, q_HI = (_decoded(case, coded, at) for coded, at in ((keys, rows_E), (q, row)))
    products_HE = q_HI @ keys_EI.T
    scores_E = weights_TH[row].double() @ products_HE.relu() * (case.width * case.heads) ** -0.5
    if candidates_TB is None:
        return scores_E
    blocks_E = torch.arange(len(scores_E), device=scores_E.device) // case.candidate_block
    return scores_E.masked_fill(~torch.isin(blocks_E, candidates_TB[row]), -torch.inf)


def _decoded(case: Any, coded: Any, rows: Any) -> torch.Tensor:
    """float64, some rows of index keys or queries."""
    if isinstance(coded, torch.Tensor):
        return coded[rows].double()
    return decode_index(case.key_format, *(part[rows] for part in coded)).double()


def block_scores(case: Any, scores_E: torch.Tensor) -> torch.Tensor:
    """[N], what the blocks of candidates are as good as; the newest is better than all."""
    missing = -len(scores_E) % case.candidate_block
    padded = torch.nn.functional.pad(scores_E, (0, missing), value=-torch.inf)
    scores_N = padded.view(-1, case.candidate_block).amax(-1)
    scores_N[-1:] = torch.inf
    return scores_N


def entry_numbers(lists_TE: torch.Tensor, rows_TK: torch.Tensor) -> torch.Tensor:
    """Where rows stand in the lists; -1 for -1, and beyond the list for what it has not."""
    numbers_TK = torch.full_like(rows_TK, -1)
    entries = lists_TE.shape[1]
    lists_TE = torch.nn.functional.pad(lists_TE, (0, 1), value=-2).to(rows_TK.device)
    for list_E, rows_K, numbers_K in zip(lists_TE, rows_TK, numbers_TK, strict=True):
        same_KE = rows_K.unsqueeze(1) == list_E
        found_K = torch.where(same_KE.any(1), same_KE.int().argmax(1), entries)
        numbers_K.copy_(torch.where(rows_K < 0, -1, found_K))
    return numbers_TK


_DECODE_ARGUMENTS = 5  # of the indexer's decode form, whose rows have lists of their own


def _same_choice(
    case: Any, call: Call, actual: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float
) -> Comparison:
    """As many entries, ascending and distinct; where a rounding lets the choice differ, entries
    whose true scores are equal within the tolerance. Blocks of candidates likewise. Scores, where
    they are given, are those of the entries."""
    scores: tuple[torch.Tensor, ...] = ()
    if case.gives_scores and len(call.arguments) == _DECODE_ARGUMENTS:
        actual, scores, expected = actual[:1], actual[1:], expected[:1]
    if case.gives_rows and len(call.arguments) == _DECODE_ARGUMENTS:
        lists_TE = call.arguments[3]
        actual, expected = (
            tuple(entry_numbers(lists_TE, rows_TK) for rows_TK in results)
            for results in (actual, expected)
        )
    found = [_same_scores(case, call, actual[0], own_TK, tolerance) for own_TK in scores]
    for place, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if not torch.equal(ours < 0, theirs < 0):
            return Comparison(torch.inf, "another number of entries was chosen")
        if not ((ours[:, 1:] > ours[:, :-1]) | (ours[:, 1:] < 0)).all():
            return Comparison(torch.inf, "the entries are not in ascending order")
        for row in (ours != theirs).any(1).nonzero().flatten().tolist():
            mine, other = set(ours[row].tolist()), set(theirs[row].tolist())
            lost, won = sorted(other - mine), sorted(mine - other)
            scores_E = index_scores(case, call, row)
            largest = float(scores_E[scores_E.isfinite()].abs().max())
            scores_N = block_scores(case, scores_E) if place else scores_E
            off = max(float(scores_N[lost].max() - scores_N[won].min()), 0.0)
            problem = f"row {row} misses an entry that scores {off:.3g} more than one it has"
            found.append(Comparison(off / largest, "" if off <= tolerance * largest else problem))
    return worst(found)


def _same_scores(
    case: Any, call: Call, ids_TK: torch.Tensor, scores_TK: torch.Tensor, tolerance: float
) -> Comparison:
    """Whether each entry has its own score, as far as rounding goes, and -1 has -inf."""
    if not torch.equal(scores_TK == -torch.inf, ids_TK < 0):
        return Comparison(torch.inf, "scores and entries are not of the same places")
    furthest = 0.0
    for row, (ids_K, scores_K) in enumerate(zip(ids_TK, scores_TK, strict=True)):
        own_K = ids_K[ids_K >= 0]
        if not len(own_K):
            continue
        least = torch.finfo(torch.float32).min
        scores_E = index_scores(case, call, row).nan_to_num(nan=least)
        largest = max([0.0, *scores_E[scores_E > least].abs().tolist()])
        off_K = (scores_E[own_K] - scores_K[: len(own_K)].double()).abs()
        furthest = max(furthest, float(off_K.max()) / (largest or 1.0))
    problem = f"a score is off by {furthest:.3g} of the largest"
    return Comparison(furthest, "" if furthest <= tolerance else problem)


def _same_routes(
    case: Any, call: Call, actual: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float
) -> Comparison:
    """The same experts with the same weights, in any order; -1 has none."""
    (ours, our_weights), (theirs, their_weights) = (
        (ids.sort(-1).values, weights.masked_fill(ids < 0, 0.0).gather(1, ids.argsort(-1)))
        for ids, weights in (actual, expected)
    )
    if not torch.equal(ours, theirs):
        return Comparison(torch.inf, "other experts were chosen")
    return near(our_weights, their_weights, tolerance)


_SPECIAL: Mapping[str, Callable[..., Comparison]] = MappingProxyType(
    {
        "attention.index_topk": _same_choice,
        "attention.index_topk_decode": _same_choice,
        "moe.route_learned": _same_routes,
    }
)


def changed(op: str, before: Call, after: Call) -> str:
    """Which argument or weight was changed that `op` may not overwrite; "" where none was."""
    for place, (old, new) in enumerate(zip(before.arguments, after.arguments, strict=True)):
        if place not in OVERWRITTEN.get(op, ()):
            for one, other in zip(tensors(old), tensors(new), strict=True):
                if not same_bytes(one, other):
                    return f"argument {place} was changed"
    for one, other in zip(tensors(before.weights), tensors(after.weights), strict=True):
        if not same_bytes(one, other):
            return "a weight was changed"
    return ""


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of an argument, which may be a tuple of them."""
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.contiguous(), other.contiguous()
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Poisoned(TorchFunctionMode):
    """While it is on, memory that Python code takes without filling it holds 255 in every byte:
    NaN in every floating point format, -1 in whole numbers. Freed and fresh memory is often zero,
    which hides what a kernel never wrote; here the fill does not depend on the allocator."""

    _FACTORIES = frozenset(
        {
            torch.empty,
            torch.empty_like,
            torch.empty_strided,
            torch.Tensor.new_empty,
            torch.Tensor.new_empty_strided,
        }
    )

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple = (), named: Any = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        if function in self._FACTORIES and result.device.type != "meta":
            result.untyped_storage().fill_(255)
        return result
