"""Sampling: from logits to tokens, all rows of a step at once, without waiting for the device.

Order of operations as in vLLM v1: log-probabilities of the raw logits; allowed tokens, min_tokens,
logit_bias, penalties (repetition over prompt and output, frequency and presence over output);
temperature, min_p, top_k, top_p; draw. Ties go to the lowest token id. What is done on the device
is told by the contracts in `ops.sample`; here requests become its arguments.

Shape suffixes: R rows, N entries of lists, P drafted tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from metainfer.core.events import TokenLogprob
from metainfer.kernels.registry import Registry
from metainfer.llm.parcel import Given, fetch, send
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.step import IN_FLIGHT
from metainfer.llm.token_counts import TokenCounts
from metainfer.ops.base import Target
from metainfer.ops.sample import ADJUST, DRAW, LOGPROBS, NOT_FINITE, NOTHING_LEFT, SampleCase

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: logits divided by less overflow."""

_ERRORS: Mapping[int, str] = MappingProxyType(
    {
        NOT_FINITE: "the model's logits for this request are not finite numbers",
        NOTHING_LEFT: "allowed_token_ids and min_tokens together leave no token to choose",
    }
)
_NO_TOKEN = -1


class SequenceSampling:
    """What sampling must know of a request as long as it lives, preempted or not.

    Attributes:
        prompt_logprobs: those computed so far; the first token has none.
    """

    def __init__(self, request: Request, eos_token_ids: tuple[int, ...]) -> None:
        params = request.sampling
        self.request = request
        self.params = params
        self.num_prompt = len(request.prompt_token_ids)
        self.greedy = params.temperature < _GREEDY_BELOW
        seed = secrets.randbits(63) if params.seed is None else params.seed
        margin = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        inverse = 0.0 if self.greedy else 1.0 / params.temperature
        self.rules = (inverse, params.top_p, margin)
        self.numbers = (max(0, params.top_k), seed)
        self.filters = not self.greedy and (
            params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        )
        self.factors = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        allowed = params.allowed_token_ids
        self.allowed = _ids(() if allowed is None else dict.fromkeys(allowed))
        self.ends = _ids(sorted({*eos_token_ids, *params.stop_token_ids}))
        self.bias_ids = _ids(params.logit_bias)
        self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.counts: TokenCounts | None = None
        repeats = params.repetition_penalty != 1.0
        if repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self.counts = TokenCounts(request.prompt_token_ids if repeats else ())
        # Most rows have nothing to change before the temperature; one test tells.
        self.changes_logits = bool(
            self.counts is not None
            or params.logit_bias
            or allowed is not None
            or params.min_tokens > 0
        )

    def accept(self, token_ids: Iterable[int]) -> None:
        """Take note of new output tokens."""
        if self.counts is not None:
            for token_id in token_ids:
                self.counts.add(token_id)


class Row(NamedTuple):
    """One row of logits and what it is for.

    Attributes:
        position: of the token to be drawn, counted from the start of the prompt.
        drafts: tokens between the last one that `state` has accepted and this row, taken for
            granted here; IN_FLIGHT stands for the last token drawn of the row's slot.
        slot: of its sequence.
    """

    state: SequenceSampling
    position: int
    drafts: tuple[int, ...] = ()
    slot: int = 0


class Draw(NamedTuple):
    """A drawn token, or a sentence why there is none."""

    token_id: int
    logprob: TokenLogprob | None
    error: str | None


class Draws:
    """Tokens that the device is drawing, or has drawn."""

    def __init__(self, rows: Sequence[Row], drawn_2R: Given, logprobs: _RowLogprobs | None) -> None:
        self._rows = rows
        self._drawn_2R = drawn_2R
        self._logprobs = logprobs

    def wait(self) -> list[Draw]:
        """One for each row, once they are there."""
        tokens, errors = self._drawn_2R.wait().tolist()
        logprobs = {} if self._logprobs is None else self._logprobs.wait(tokens)
        return [
            Draw(token, logprobs.get(i), _ERRORS.get(error))
            for i, (token, error) in enumerate(zip(tokens, errors, strict=True))
        ]


class _RowLogprobs(NamedTuple):
    """Log-probabilities on their way, for the rows that asked.

    Attributes:
        rows: which rows.
        tops: how many alternatives each wants.
        found: what `sample.logprobs` returned.
    """

    rows: Sequence[int]
    tops: Sequence[int]
    found: tuple[Given, Given, Given]

    def wait(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """By row; `tokens` are those of all rows."""
        own_R, tops_RK, ids_RK = (given.wait() for given in self.found)
        chosen = [tokens[row] for row in self.rows]
        made = _token_logprobs(chosen, own_R, tops_RK, ids_RK, self.tops)
        return dict(zip(self.rows, made, strict=True))


class Sampler:
    """Samples the rows of steps on one device, in the stream that is current.

    Attributes:
        kernels: what it has bound.
        last_tokens_S: int64 on the device, by slot, with one more for none: the token that was
            drawn last.
    """

    def __init__(
        self,
        registry: Registry,
        target: Target,
        vocab_size: int,
        device: torch.device,
        num_slots: int = 1,
        kernel_order: str = "",
    ) -> None:
        case = SampleCase(vocab_size)
        self._vocab_size = vocab_size
        self._device = device
        self.kernels = tuple(
            registry.bind(op.name, case, target, kernel_order) for op in (ADJUST, DRAW, LOGPROBS)
        )
        self._adjust, self._draw, self._logprobs = (kernel.run for kernel in self.kernels)
        self.last_tokens_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def launch(self, logits_RV: torch.Tensor, rows: Sequence[Row]) -> Draws:
        """Draw a token for each row of `logits_RV` (fp32, dense). A row depends on nothing but its
        logits, its request and its position: neither on its neighbours nor on what was drawn
        before. The token is left in the row's slot; where rows share one, that of any of them."""
        slots_R, rules_R3, numbers_R3 = self._sent(rows)
        adjusted_RV = self._change_logits(logits_RV, rows, slots_R)
        filters = any(row.state.filters for row in rows)
        drawn_2R = self._draw(logits_RV, adjusted_RV, rules_R3, numbers_R3, filters)
        self.last_tokens_S.index_copy_(0, slots_R, drawn_2R[0])
        logprobs = self._row_logprobs(logits_RV, drawn_2R[0], rows)
        return Draws(rows, fetch(drawn_2R), logprobs)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every kernel in every form, so that none is compiled when a request asks for it."""
        for draws in self.launch_all_forms():
            draws.wait()

    @torch.inference_mode()
    def launch_all_forms(self) -> list[Draws]:
        """Draws that start every kernel in every form."""
        logits_1V = torch.zeros(1, self._vocab_size, device=self._device)
        made = []
        for rules in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)):
            for params in (rules, replace(rules, presence_penalty=1.0, logprobs=1)):
                request = Request("warm-up", (0,), replace(params, seed=0), 0.0)
                made.append(self.launch(logits_1V, [Row(SequenceSampling(request, ()), 1)]))
        return made

    def token_logprobs(
        self, logits_RV: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int]
    ) -> list[TokenLogprob]:
        """Log-probabilities of tokens under `logits_RV`, each with its `tops[r]` likeliest
        alternatives, likeliest first. Waits for the device."""
        found = self.launch_logprobs(logits_RV, token_ids, max(tops))
        own_R, tops_RK, ids_RK = (part.cpu() for part in found)
        return _token_logprobs(token_ids, own_R, tops_RK, ids_RK, tops)

    def launch_logprobs(
        self, logits_RV: torch.Tensor, token_ids: Sequence[int], top: int
    ) -> tuple[torch.Tensor, ...]:
        """As `sample.logprobs` returns them, on the device."""
        (tokens_R,) = send(self._device, [np.array(token_ids, dtype=np.int64)])
        found: tuple[torch.Tensor, ...] = self._logprobs(
            logits_RV, tokens_R, min(top, self._vocab_size)
        )
        return found

    def _sent(
        self, rows: Sequence[Row]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Slots, and rules and numbers as `sample.draw` takes them."""
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        if all(row.state.greedy for row in rows):
            return send(self._device, [slots])[0], None, None
        numbers = np.array([(*row.state.numbers, row.position) for row in rows], dtype=np.int64)
        rules = np.array([row.state.rules for row in rows], dtype=np.float32)
        slots_R, numbers_R3, rules_R3 = send(self._device, [slots, numbers, rules])
        return slots_R, rules_R3, numbers_R3

    def _change_logits(
        self, logits_RV: torch.Tensor, rows: Sequence[Row], slots_R: torch.Tensor
    ) -> torch.Tensor | None:
        """What requests change in their logits; None where no row changes any."""
        if not any(row.state.changes_logits for row in rows):
            return None
        lists = [part for row in rows for part in _lists(row)]
        starts: np.ndarray = np.zeros((len(rows), 5), dtype=np.int64)
        starts[:, 1:] = np.cumsum([len(ids) for ids, _ in lists]).reshape(-1, 4)
        starts[1:, 0] = starts[:-1, 4]
        ids = np.concatenate([ids for ids, _ in lists])
        values = np.concatenate([values for _, values in lists])
        factors = np.array([row.state.factors for row in rows], dtype=np.float32)
        drafts = [() if row.state.counts is None else row.drafts for row in rows]
        recent: np.ndarray = np.full((len(rows), max(map(len, drafts))), _NO_TOKEN, dtype=np.int64)
        for i, tokens in enumerate(drafts):
            recent[i, : len(tokens)] = tokens
        starts_R5, ids_N, recent_RP, values_N, factors_R3 = send(
            self._device, [starts, ids, recent, values, factors]
        )
        if recent.size:
            last_R1 = self.last_tokens_S.index_select(0, slots_R)[:, None]
            recent_RP = torch.where(recent_RP == IN_FLIGHT, last_R1, recent_RP)
        return self._adjust(logits_RV, starts_R5, ids_N, values_N, recent_RP, factors_R3)

    def _row_logprobs(
        self, logits_RV: torch.Tensor, tokens_R: torch.Tensor, rows: Sequence[Row]
    ) -> _RowLogprobs | None:
        tops = {
            i: row.state.params.logprobs
            for i, row in enumerate(rows)
            if row.state.params.logprobs is not None
        }
        if not tops:
            return None
        if len(tops) < len(rows):
            (picked,) = send(self._device, [np.array(list(tops), dtype=np.int64)])
            logits_RV, tokens_R = logits_RV[picked], tokens_R[picked]
        most = min(max(tops.values()), self._vocab_size)
        own_R, tops_RK, ids_RK = self._logprobs(logits_RV, tokens_R, most)
        found = fetch(own_R), fetch(tops_RK), fetch(ids_RK)
        return _RowLogprobs(list(tops), list(tops.values()), found)


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(list(token_ids), dtype=np.int64)


def _lists(row: Row) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and values of the row's four lists, as `sample.adjust` takes them."""
    state = row.state
    yield state.allowed, np.zeros(len(state.allowed), dtype=np.float32)
    ends = state.ends if row.position - state.num_prompt < state.params.min_tokens else _ids(())
    yield ends, np.zeros(len(ends), dtype=np.float32)
    yield state.bias_ids, state.bias_values
    if state.counts is None:
        yield _ids(()), np.zeros(0, dtype=np.float32)
    else:
        yield state.counts.ids, state.counts.counts


def _token_logprobs(
    token_ids: Sequence[int],
    own_R: torch.Tensor,
    tops_RK: torch.Tensor,
    ids_RK: torch.Tensor,
    tops: Sequence[int],
) -> list[TokenLogprob]:
    """Each row with as many alternatives as it wants; all tensors are on the host."""
    rows = zip(token_ids, own_R.tolist(), ids_RK.tolist(), tops_RK.tolist(), tops, strict=True)
    return [
        TokenLogprob(token, own, tuple(zip(ids[:top], values[:top], strict=True)))
        for token, own, ids, values, top in rows
    ]
