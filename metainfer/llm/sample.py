"""Sampling: from logits to tokens, vectorised over the rows of a step.

Order of operations as in vLLM v1: log-probabilities of the raw logits; allowed tokens, min_tokens,
logit_bias, penalties (repetition over prompt and output, frequency and presence over output);
temperature, min_p, top_k, top_p; draw. Ties go to the lowest token id.

Shape suffixes: R rows, N rows that are drawn at random, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from metainfer.core.events import TokenLogprob
from metainfer.llm.request import Request
from metainfer.llm.truncate import keep_likeliest

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: logits divided by less overflow."""

_NOT_FINITE = "the model's logits for this request are not finite numbers"
_NOTHING_ALLOWED = "allowed_token_ids and min_tokens together leave no token to choose"


class TokenCounts:
    """How often each token occurs in the output; tokens of the prompt count 0 but are listed."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        ids = list(dict.fromkeys(prompt_token_ids))
        self._index = {token_id: i for i, token_id in enumerate(ids)}
        self._ids: np.ndarray = np.array(ids, dtype=np.int64)
        self._counts: np.ndarray = np.zeros(len(ids), dtype=np.float32)

    def add(self, token_id: int) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            room = max(16, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[index] = token_id
        self._counts[index] += 1

    def with_drafts(self, drafts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64, counts float32), each id once, as if `drafts` were output already."""
        size = len(self._index)
        ids, counts = self._ids[:size], self._counts[:size]
        for draft in drafts:
            hits = ids == draft
            if hits.any():
                counts = counts + hits.astype(np.float32)
            else:
                ids = np.append(ids, draft)
                counts = np.append(counts, np.float32(1))
        return ids, counts


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
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.ends = np.array(sorted({*eos_token_ids, *params.stop_token_ids}), dtype=np.int64)
        self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
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
            or params.allowed_token_ids is not None
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
        drafts: tokens between the last known one and this row, taken for granted here.
    """

    state: SequenceSampling
    position: int
    drafts: tuple[int, ...] = ()


class Draw(NamedTuple):
    """A drawn token, or a sentence why there is none."""

    token_id: int
    logprob: TokenLogprob | None
    error: str | None


def sample(logits_RV: torch.Tensor, rows: Sequence[Row]) -> list[Draw]:
    """Draw a token for each row of `logits_RV` (fp32). A row depends on nothing but its logits,
    its request and its position: neither on its neighbours nor on what was drawn before."""
    changed_RV = _change_logits(logits_RV, rows)
    tokens_R = _choose(changed_RV, rows)
    # A row with a NaN or an infinity has no finite sum.
    sums_R = logits_RV.sum(-1)
    chosen_R = changed_RV.gather(1, tokens_R[:, None])[:, 0]
    tokens: list[int] = tokens_R.tolist()
    sums, chosen = torch.stack([sums_R, chosen_R]).tolist()
    logprobs = _row_logprobs(logits_RV, tokens_R, rows)
    draws = []
    for i, token_id in enumerate(tokens):
        error = None
        if not math.isfinite(sums[i]):
            error = _NOT_FINITE
        elif chosen[i] == -math.inf:
            error = _NOTHING_ALLOWED
        draws.append(Draw(token_id, logprobs.get(i), error))
    return draws


# ---- log-probabilities ----


def token_logprobs(
    logits_RV: torch.Tensor, token_ids_R: torch.Tensor, tops: Sequence[int]
) -> list[TokenLogprob]:
    """Log-probabilities of `token_ids_R` (int64) under `logits_RV`, each with its `tops[r]`
    likeliest alternatives, likeliest first."""
    norms_R1 = logits_RV.logsumexp(-1, keepdim=True)
    own: list[float] = (logits_RV.gather(1, token_ids_R[:, None]) - norms_R1)[:, 0].tolist()
    token_ids: list[int] = token_ids_R.tolist()
    most = min(max(tops), logits_RV.shape[1])
    if most == 0:
        return [TokenLogprob(t, p) for t, p in zip(token_ids, own, strict=True)]
    values_RK, ids_RK = logits_RV.topk(most, dim=-1)
    all_values, all_ids = (values_RK - norms_R1).tolist(), ids_RK.tolist()
    result = []
    for row, top in enumerate(tops):
        pairs = zip(all_ids[row][:top], all_values[row][:top], strict=True)
        ordered = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
        result.append(TokenLogprob(token_ids[row], own[row], ordered))
    return result


def _row_logprobs(
    logits_RV: torch.Tensor, tokens_R: torch.Tensor, rows: Sequence[Row]
) -> dict[int, TokenLogprob]:
    """Row index -> log-probabilities, for the rows that asked."""
    asked = {
        i: row.state.params.logprobs
        for i, row in enumerate(rows)
        if row.state.params.logprobs is not None
    }
    if not asked:
        return {}
    picked = torch.tensor(list(asked), device=logits_RV.device)
    found = token_logprobs(logits_RV[picked], tokens_R[picked], list(asked.values()))
    return dict(zip(asked, found, strict=True))


# ---- what requests change in their logits ----


def _change_logits(logits_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Masks, biases and penalties; `logits_RV` itself where no row has any, else a copy."""
    changing = [i for i, row in enumerate(rows) if row.state.changes_logits]
    if not changing:
        return logits_RV
    changed_RV = logits_RV.clone()
    flat = changed_RV.view(-1)
    vocab, device = logits_RV.shape[1], logits_RV.device
    for i in changing:
        _keep_allowed(changed_RV[i], rows[i].state.params.allowed_token_ids)
    ends: list[np.ndarray] = []
    bias_at: list[np.ndarray] = []
    bias: list[np.ndarray] = []
    for i in changing:
        state = rows[i].state
        if rows[i].position - state.num_prompt < state.params.min_tokens:
            ends.append(state.ends + i * vocab)
        if len(state.bias_ids):
            bias_at.append(state.bias_ids + i * vocab)
            bias.append(state.bias_values)
    if ends:
        flat.index_fill_(0, _on(device, ends), -math.inf)
    if bias:
        flat.index_add_(0, _on(device, bias_at), _on(device, bias))
    _penalise(flat, vocab, rows, [i for i in changing if rows[i].state.counts is not None])
    return changed_RV


def _keep_allowed(row_V: torch.Tensor, allowed: tuple[int, ...] | None) -> None:
    if allowed is not None:
        ids = torch.tensor(allowed, device=row_V.device)
        kept = row_V[ids]
        row_V.fill_(-math.inf)
        row_V[ids] = kept


def _penalise(flat: torch.Tensor, vocab: int, rows: Sequence[Row], penalised: list[int]) -> None:
    """Penalties on the tokens that each row has seen; `flat` are the logits [R * V]."""
    at: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    factors: list[np.ndarray] = []
    for i in penalised:
        state, _, drafts = rows[i]
        if state.counts is None:
            continue
        ids, count = state.counts.with_drafts(drafts)
        params = state.params
        at.append(ids + i * vocab)
        counts.append(count)
        three = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        factors.append(np.tile(np.array(three, dtype=np.float32), (len(ids), 1)))
    if not at:
        return
    device = flat.device
    index, count = _on(device, at), _on(device, counts)
    repetition, frequency, presence = _on(device, factors).unbind(1)
    logits = flat[index]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    flat[index] = logits - frequency * count - presence * (count > 0)


def _on(device: torch.device, arrays: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)


# ---- choice ----


def _choose(logits_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Tokens, int64 [R]: the likeliest of greedy rows, a draw for the others."""
    drawn = [i for i, row in enumerate(rows) if not row.state.greedy]
    if len(drawn) == len(rows):
        return _draw(logits_RV, rows)
    tokens_R = logits_RV.argmax(-1)  # the first of equal ones
    if drawn:
        index_N = torch.tensor(drawn, device=logits_RV.device)
        tokens_R[index_N] = _draw(logits_RV[index_N], [rows[i] for i in drawn])
    return tokens_R


def _draw(logits_NV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    params = [row.state.params for row in rows]
    device = logits_NV.device
    temperatures = torch.tensor([p.temperature for p in params], device=device)
    p_NV = (logits_NV / temperatures[:, None]).softmax(-1)
    if any(p.min_p > 0.0 for p in params):
        least = torch.tensor([p.min_p for p in params], device=device)[:, None]
        p_NV.masked_fill_(p_NV < least * p_NV.amax(-1, keepdim=True), 0.0)
    p_NV = keep_likeliest(p_NV, [p.top_k for p in params], [p.top_p for p in params])
    return _race(p_NV, [(row.state.seed, row.position) for row in rows])


def _race(p_NV: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
    """One token per row with probability proportional to `p_NV`; equal keys, equal luck.

    A race of exponential clocks: argmax p / E with E ~ Exp(1) is a draw from p, and rounding in p
    changes the winner only in a near dead heat (the cumulative sum of inverse sampling would move
    every boundary). It is run in two heats, between stretches of about sqrt(V) tokens and then
    within the winning one, so that a row costs 2 sqrt(V) random numbers instead of V.
    """
    count, vocab = p_NV.shape
    stretch = 1 << math.ceil(math.log2(max(2, vocab)) / 2)
    groups = -(-vocab // stretch)
    if groups * stretch != vocab:
        p_NV = torch.nn.functional.pad(p_NV, (0, groups * stretch - vocab))
    p_NGS = p_NV.view(count, groups, stretch)
    clocks = torch.empty(count, groups + stretch, device=p_NV.device)
    generator = torch.Generator(p_NV.device)
    for row, (seed, position) in enumerate(keys):
        generator.manual_seed(_mix(seed, position))
        clocks[row].exponential_(generator=generator)
    clocks.clamp_min_(torch.finfo(torch.float32).tiny)
    winner_N = (p_NGS.sum(-1) / clocks[:, :groups]).argmax(-1)
    p_NS = p_NGS[torch.arange(count, device=p_NV.device), winner_N]
    return winner_N * stretch + (p_NS / clocks[:, groups:]).argmax(-1)


def _mix(seed: int, position: int) -> int:
    """64 well-mixed bits of (seed, position): the finaliser of SplitMix64
    (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    mask = (1 << 64) - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
