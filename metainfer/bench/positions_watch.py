"""Notes what is computed at sampled positions, and computes it again by the references.

Layers are told apart by their order: each attends once in a step. Rows of a step end with the
last one; where a layer computes fewer rows, they are the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from metainfer.arch.cache_kinds import BLOCK_TOKENS
from metainfer.arch.record import Arch
from metainfer.bench.positions_noted import Finding, NotedLayer, span_of, tokens_of, within
from metainfer.kernels.compare import Comparison, compare, entry_numbers, near
from metainfer.kernels.inputs.base import Call
from metainfer.kernels.reference import attention as plain_attention
from metainfer.kernels.reference import cache as plain_cache
from metainfer.kernels.reference import compress as plain_compress
from metainfer.kernels.reference import index as plain_index
from metainfer.kernels.reference import rope as plain_rope
from metainfer.kernels.reference.formats import decode_index, decode_rows, hadamard
from metainfer.kernels.registry import Kernel
from metainfer.kernels.verify import exact_products
from metainfer.nn.rotary import RotaryTable, compressing_table, sliding_table
from metainfer.ops.attention import DENSE, AttentionCase
from metainfer.ops.catalogue import OPS
from metainfer.ops.compress import CompressCase
from metainfer.ops.index import IndexCase

CACHED = "entries in the cache"
KEYS = "index keys in the cache"
_CODED = 2.0**-4
"""Of the largest number of a row: what rounding to e4m3 may change."""
_KEY_CODED: Mapping[str, float] = MappingProxyType({"index_fp8": _CODED, "index_fp4": 2.0**-2})
"""The same by format of index keys."""


class PositionsWatch:
    """A watcher of `bench.watched.Watched`; notes nothing outside `begin` and `end`."""

    def __init__(self) -> None:
        self._watching: _Watching | None = None

    def begin(
        self,
        arch: Arch,
        blocks: Sequence[int],
        positions: Sequence[int],
        decoded: int,
        draft_rows: int = 0,
    ) -> None:
        """
        Args:
            blocks: of the sequence, in order.
            positions: of the prompt.
            decoded: the position behind it, which a decode step computes.
            draft_rows: that rings hold beyond what is visible.
        """
        self._watching = _Watching(arch, blocks, positions, decoded, draft_rows)

    def expect(self, start: int, rows: int) -> None:
        """What the next step computes."""
        assert self._watching is not None
        self._watching.expect(start, rows)

    def end(self) -> tuple[Finding, ...]:
        """What was found."""
        assert self._watching is not None
        watching, self._watching = self._watching, None
        return tuple(watching.findings)

    def run(self, kernel: Kernel, *arguments: Any) -> Any:
        """Run a kernel; note and check what it gives at the sampled positions."""
        if self._watching is None:
            return kernel.run(*arguments)
        return self._watching.run(kernel, arguments)


class _Watching:
    """What was noted and found so far."""

    def __init__(
        self,
        arch: Arch,
        blocks: Sequence[int],
        positions: Sequence[int],
        decoded: int,
        draft_rows: int,
    ) -> None:
        self.findings: list[Finding] = []
        self._arch = arch
        self._draft_rows = draft_rows
        self._positions = (*positions, decoded)
        self._blocks = list(blocks)
        self._layers = [NotedLayer(layer) for layer in arch.layers]
        self._tables: dict[bool, RotaryTable] = {}  # by whether layers compress
        self._cache_rows: dict[int, torch.Tensor] = {}  # of all entries, by ratio
        self._windows: dict[int, set[int]] = {}  # that are made again, by ratio
        self._needed: dict[int, set[int]] = {}  # positions whose states they mix
        for ratio, span in {(layer.ratio, span_of(layer)) for layer in arch.layers if layer.ratio}:
            last = {(p + 1) // ratio - 1 for p in positions} - {-1}
            self._windows[ratio] = last
            self._needed[ratio] = {t for w in last for t in tokens_of(w, ratio, span)}
        window = arch.sliding_window
        self._seen = {t for p in self._positions for t in range(max(0, p - window + 1), p + 1)}
        self._start = self._rows = 0
        self._place = 0  # of the layer that is computed
        self._handlers: dict[str, Callable[[Kernel, tuple[Any, ...]], Any]] = {
            "rope.rotate": self._rotate,
            "rope.norm_rotate": self._rotate,
            "cache.write": self._rotate,
            "attention.compress": self._compress,
            "attention.compress_step": self._compress_step,
            "attention.index_topk": self._choose,
            "attention.index_topk_decode": self._choose,
            "attention.sparse_prefill": self._attend,
            "attention.sparse_decode": self._attend_decode,
        }

    def expect(self, start: int, rows: int) -> None:
        self._start, self._rows, self._place = start, rows, 0
        for layer in self._layers:
            layer.compressed = 0
            layer.chosen.clear()

    def run(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        handler = self._handlers.get(kernel.op)
        return kernel.run(*arguments) if handler is None else handler(kernel, arguments)

    # ---- where things lie ----

    @property
    def _layer(self) -> NotedLayer:
        return self._layers[self._place]

    def _rows_of(self, rows: int) -> list[tuple[int, int]]:
        """(position, its row) of those sampled ones that are among the last `rows` of the step."""
        end = self._start + self._rows
        first = max(self._start, end - rows)
        return [(p, p - first) for p in self._positions if first <= p < end]

    def _entry_rows(self, ratio: int, entries: int, device: torch.device) -> torch.Tensor:
        """int64 [1, E], cache rows of the first entries of the sequence."""
        known = self._cache_rows.get(ratio)
        if known is None:
            per_block = BLOCK_TOKENS // ratio
            numbers = [b * per_block + n for b in self._blocks for n in range(per_block)]
            known = self._cache_rows[ratio] = torch.tensor(numbers, device=device)
        return known[:entries].unsqueeze(0)

    def _rotation(self, positions: Sequence[int], device: torch.device) -> torch.Tensor:
        """fp32 [T, R / 2, 2] of the current layer at some positions."""
        compresses = bool(self._layer.arch.ratio)
        if compresses not in self._tables:
            made = compressing_table if compresses else sliding_table
            self._tables[compresses] = made(self._arch, device)
        where_T = torch.tensor(list(positions), device=device)
        rows: torch.Tensor = self._tables[compresses].rows(where_T, self._arch.max_model_len)
        return rows

    # ---- what is compared ----

    def _found(self, op: str, position: int, comparison: Comparison, tolerance: float) -> None:
        layer = self._layer.arch.index
        one = Finding(op, layer, position, comparison.error, tolerance, comparison.problem)
        self.findings.append(one)

    def _near(
        self,
        op: str,
        position: int,
        ours: torch.Tensor,
        theirs: torch.Tensor,
        tolerance: float,
    ) -> None:
        self._found(op, position, near(ours, theirs, tolerance), tolerance)

    # ---- operations ----

    def _rotate(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        """rope.rotate, rope.norm_rotate and cache.write of tokens: x, (weight,) angles first."""
        x, *others = arguments
        if getattr(kernel.case, "inverse", False):  # of what a layer's attention gave
            self._place -= 1
            try:
                return self._rotated(kernel, x, others)
            finally:
                self._place += 1
        return self._rotated(kernel, x, others)

    def _rotated(self, kernel: Kernel, x: torch.Tensor, others: list[Any]) -> Any:
        rows = self._rows_of(len(x)) if len(x) <= self._rows else []
        if kernel.op == "cache.write" and others[0] is None:
            rows = []  # entries, which are normed before
        before = [x[row : row + 1].clone() for _, row in rows]
        result = kernel.run(x, *others)
        tolerance = OPS[kernel.op].tolerance.of(kernel.case.dtype)
        for (position, row), one in zip(rows, before, strict=True):
            angles = self._rotation([position], x.device)
            if kernel.op == "rope.rotate":
                expected = plain_rope.rotate(kernel.case, one, angles)
            elif kernel.op == "rope.norm_rotate":
                expected = plain_rope.norm_rotate(kernel.case, one, others[0], angles)
            else:
                cache = others[2].new_zeros(1, *others[2].shape[1:])
                first = torch.zeros(1, dtype=torch.int64, device=x.device)
                expected = plain_cache.write(kernel.case, one, others[0], angles, cache, first)
                tolerance = max(tolerance, _CODED)
            self._near(kernel.op, position, result[row : row + 1], expected, tolerance)
        return result

    def _compress(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        """attention.compress: states are noted, and windows of sampled positions made again."""
        result = kernel.run(*arguments)
        case: CompressCase = kernel.case
        rows_NW, first, norm_weight_D, *_ = arguments
        layer, which = self._layer, self._layer.compressed
        layer.compressed += 1
        behind = first * case.ratio - (case.span - case.ratio)  # position of row 0
        stop = min(self._start + self._rows, behind + len(rows_NW))
        for token in within(self._needed[case.ratio], self._start, stop):
            layer.states[which, token] = rows_NW[token - behind].clone()
        tolerance = OPS[kernel.op].tolerance.of(case.dtype)
        for window in within(self._windows[case.ratio], first, first + len(result)):
            keys = [(which, token) for token in tokens_of(window, case.ratio, case.span)]
            if not all(key in layer.states for key in keys):
                continue  # a chunk ended within it
            rows = torch.stack([layer.states[key] for key in keys])
            rows = torch.cat([rows.new_zeros(case.span - len(rows), rows.shape[1]), rows])
            angles = self._rotation([window * case.ratio], rows.device)
            expected = plain_compress.compress(case, rows, window, norm_weight_D, angles)
            position = (window + 1) * case.ratio - 1
            ours = result[window - first : window - first + 1]
            self._near(kernel.op, position, ours, expected, tolerance)
            layer.entries[which, window] = expected
        return result

    def _compress_step(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        """attention.compress_step of the row behind the prompt, in slot 0: where it closes a
        window, the entry is made again of what the ring has at the rows of its tokens."""
        case: CompressCase = kernel.case
        state_TW, bias_RW, _, ring_NW, _, _, norm_weight_D, *_ = arguments
        layer, which = self._layer, self._layer.compressed
        layer.compressed += 1
        closing = [p for p, _ in self._rows_of(self._rows) if (p + 1) % case.ratio == 0]
        rows = {p: self._ring_rows(case, p, ring_NW) for p in closing}
        for position in closing:  # its own, before it is there
            rows[position][-1] = state_TW[position - self._start] + bias_RW[-1]
        result = kernel.run(*arguments)
        tolerance = OPS[kernel.op].tolerance.of(case.dtype)
        for position in closing:
            window, at = position // case.ratio, position - self._start
            angles = self._rotation([window * case.ratio], ring_NW.device)
            expected = plain_compress.compress(case, rows[position], window, norm_weight_D, angles)
            self._near(kernel.op, position, result[at : at + 1], expected, tolerance)
            layer.entries[which, window] = expected
        return result

    def _ring_rows(self, case: CompressCase, last: int, ring_NW: torch.Tensor) -> torch.Tensor:
        """fp32 [span, row width], of the tokens up to `last`, from the ring of slot 0; zero before
        the sequence."""
        ring = case.span + self._draft_rows
        tokens = range(last + 1 - case.span, last + 1)
        rows = ring_NW[torch.tensor([t % ring for t in tokens], device=ring_NW.device)]
        rows[: max(0, -tokens.start)] = 0.0
        return rows

    def _choose(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        """attention.index_topk and its decode form: what the references choose among the keys."""
        result = kernel.run(*arguments)
        case: IndexCase = kernel.case
        q, weights_TH, keys, lists_TE, *_ = arguments
        decodes = kernel.op == "attention.index_topk_decode"
        if decodes and case.gives_rows:
            case, result_TK = replace(case, gives_rows=False), entry_numbers(lists_TE, result)
        else:
            result_TK = result
        device = weights_TH.device
        tolerance = OPS["attention.index_topk"].tolerance.of(case.dtype)
        for position, row in self._rows_of(len(weights_TH)):
            at = slice(row, row + 1)
            query = tuple(part[at] for part in q) if isinstance(q, tuple) else q[at]
            listed = self._entry_rows(case.ratio, (position + 1) // case.ratio, device)
            where_1 = torch.tensor([position], device=device)
            call = Call((), (query, weights_TH[at], keys, listed, None, where_1, None))
            with exact_products():
                expected = plain_index.index_topk(case, *call.arguments)
            both = (result_TK[at],), (expected,)
            found = compare("attention.index_topk", case, call, *both)
            self._found(kernel.op, position, found, tolerance)
            is_entry_1K = result_TK[at] < listed.shape[1]
            self._layer.chosen[position] = torch.where(is_entry_1K, result_TK[at], -1)
            self._check_key(case, keys, listed, position)
        return result

    def _check_key(self, case: IndexCase, keys: Any, listed: torch.Tensor, position: int) -> None:
        """The key of the newest entry that a position sees, as its cache row has it."""
        expected = self._layer.entries.get((1, listed.shape[1] - 1))
        if expected is None:
            return
        row_1 = listed[0, -1:]
        tolerance = OPS["attention.compress"].tolerance.of(case.dtype)
        if isinstance(keys, torch.Tensor):
            kept = keys[row_1]
            expected = expected.to(kept.dtype)
            tolerance = max(tolerance, torch.finfo(kept.dtype).eps)
        else:
            kept = decode_index(case.key_format, *(part[row_1] for part in keys)).float()
            expected = hadamard(expected.float())
            tolerance = max(tolerance, _KEY_CODED[case.key_format])
        self._near(KEYS, position, kept, expected, tolerance)

    def _attend(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        """attention.sparse_prefill: latents are noted, and rows of sampled positions made again."""
        q_THK, _, latents_ND, _, sink_H, entries, *_, selected_TK = (*arguments, *[None] * 9)[:9]
        result = kernel.run(*arguments)
        halo = len(latents_ND) - self._rows
        for token in within(self._seen, self._start, self._start + self._rows):
            self._layer.latents[token] = latents_ND[halo + token - self._start].clone()
        for position, row in self._rows_of(len(q_THK)):
            chosen = None if selected_TK is None else selected_TK[row : row + 1]
            self._attend_again(kernel, position, q_THK, sink_H, entries, chosen, result, row)
        self._place += 1
        return result

    def _attend_decode(self, kernel: Kernel, arguments: tuple[Any, ...]) -> Any:
        """attention.sparse_decode of the row behind the prompt."""
        q_THK, ring, window_rows_TW, sink_H, entries, *_ = (*arguments, *[None] * 6)[:6]
        result = kernel.run(*arguments)
        for position, row in self._rows_of(self._rows):
            own = ring[window_rows_TW[row, -1:]]  # its latent is seen nowhere else
            if kernel.case.window_format != DENSE:
                own = decode_rows(kernel.case.window_format, own)
            self._layer.latents[position] = own[0].to(q_THK.dtype)
            chosen = self._layer.chosen.get(position)
            self._attend_again(kernel, position, q_THK, sink_H, entries, chosen, result, row)
        self._place += 1
        return result

    def _attend_again(
        self,
        kernel: Kernel,
        position: int,
        q_THK: torch.Tensor,
        sink_H: torch.Tensor | None,
        entries: torch.Tensor | None,
        chosen_1K: torch.Tensor | None,
        result: Any,
        row: int,
    ) -> None:
        case: AttentionCase = replace(kernel.case, window_format=DENSE)
        at = slice(row, row + 1)
        window = range(max(0, position - case.window + 1), position + 1)
        latents_ND = torch.stack([self._layer.latents[token] for token in window])
        where_1 = torch.tensor([position], device=q_THK.device)
        last_1 = torch.tensor([len(window) - 1], device=q_THK.device)
        listed = None
        if case.ratio and entries is not None:
            count = (position + 1) // case.ratio
            listed = self._entry_rows(case.ratio, count, q_THK.device)
            self._check_cached(case, entries, position)
        with exact_products():
            expected = plain_attention.sparse_prefill(
                case, q_THK[at], where_1, latents_ND.to(q_THK.dtype), last_1, sink_H,
                None if listed is None else entries, listed, None, chosen_1K,
            )  # fmt: skip
        ours, theirs = ((x[0] if case.lse else x) for x in (result, expected))
        tolerance = OPS[kernel.op].tolerance.of(case.dtype)
        self._near(kernel.op, position, ours[at], theirs, tolerance)

    def _check_cached(self, case: AttentionCase, entries: torch.Tensor, position: int) -> None:
        """The newest entry that a position sees, as its cache row has it."""
        window = (position + 1) // case.ratio - 1
        expected = self._layer.entries.get((0, window))
        if expected is None:
            return
        row_1 = self._entry_rows(case.ratio, window + 1, entries.device)[0, -1:]
        kept, tolerance = entries[row_1], OPS["attention.compress"].tolerance.of(case.dtype)
        if case.entry_format == DENSE:
            expected = expected.to(kept.dtype)
            tolerance = max(tolerance, torch.finfo(kept.dtype).eps)
        else:
            kept = decode_rows(case.entry_format, kept).to(expected.dtype)
            tolerance = max(tolerance, _CODED)
        self._near(CACHED, position, kept, expected, tolerance)
