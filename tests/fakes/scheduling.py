"""Drives a scheduler with the shadow model to the end, and says what each request should get."""

from __future__ import annotations

from dataclasses import dataclass, field

from metainfer.core.events import FinishEvent, FinishReason, PromptEvent, TokenEvent, Usage
from metainfer.llm.admission import Limits
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.scheduler import Scheduler
from metainfer.llm.sequence import Sequence
from metainfer.llm.step import Step, StepOutput
from tests.fakes.shadow import ShadowRunner, next_token

VOCAB, EOS = 50, 7
LIMITS = Limits(
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    max_model_len=640,
    max_num_seqs=4,
    max_num_batched_tokens=96,
    max_queued_requests=16,
    num_blocks=20,
)


def request(
    name: str, prompt: int | tuple[int, ...], max_tokens: int | None = 8, **more
) -> Request:
    priority = more.pop("priority", 0)
    if isinstance(prompt, int):
        prompt = tuple(
            (hash((len(name), name.encode()[-1], i)) % (VOCAB - 10)) + 10 for i in range(prompt)
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)
    return Request(name, prompt, sampling, arrival_s=0.0, priority=priority)


def expected(req: Request, limits: Limits = LIMITS) -> tuple[list[int], FinishReason, int | None]:
    """What the shadow model says when it is asked token by token."""
    tokens, out = req.prompt_token_ids, []
    most = limits.max_model_len - len(tokens)
    if req.sampling.max_tokens is not None:
        most = min(most, req.sampling.max_tokens)
    stops = set(req.sampling.stop_token_ids) | (set() if req.sampling.ignore_eos else {EOS})
    while len(out) < most:
        token = next_token(tokens, VOCAB)
        if token in stops:
            return out, FinishReason.STOP, token
        tokens += (token,)
        out.append(token)
    return out, FinishReason.LENGTH, None


@dataclass
class Collected:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, FinishEvent] = field(default_factory=dict)
    prompts: dict[str, PromptEvent] = field(default_factory=dict)

    def take(self, events) -> None:
        for event in events:
            assert event.request_id not in self.finished, "an event after the last one"
            match event:
                case TokenEvent(request_id, token_ids):
                    assert token_ids
                    self.tokens.setdefault(request_id, []).extend(token_ids)
                case PromptEvent(request_id):
                    assert request_id not in self.prompts and request_id not in self.tokens
                    self.prompts[request_id] = event
                case FinishEvent(request_id):
                    self.finished[request_id] = event


class Ahead:
    """Makes steps of a scheduler, `depth` of them before the results of the first are read."""

    def __init__(self, scheduler: Scheduler, runner: ShadowRunner, depth: int) -> None:
        self.scheduler, self.runner, self.depth = scheduler, runner, depth
        self.flights: list[tuple[Step, StepOutput]] = []

    def advance(self, between=lambda: None) -> list | None:
        """Events of a step that is done, None if there is none and nothing to do; `between` is
        called while steps are in flight."""
        step = self.scheduler.step()
        self.scheduler.check()
        if step is not None:
            self.flights.append((step, self.runner.execute(step)))
        between()
        if step is not None and len(self.flights) <= self.depth:
            return []
        if not self.flights:
            return None
        events = self.scheduler.update(*self.flights.pop(0))
        self.scheduler.check()
        return events


def drive(
    scheduler: Scheduler, requests, steps: int = 10_000, runner=None, depth: int = 0
) -> Collected:
    limits = scheduler.limits
    runner = runner or ShadowRunner(VOCAB, limits.max_num_batched_tokens, limits.draft_rows)
    seen = Collected()
    for each in requests:
        scheduler.add(each)
    ahead = Ahead(scheduler, runner, depth)
    while (events := ahead.advance()) is not None:
        seen.take(events)
        steps -= 1
        assert steps > 0, "the scheduler goes on for ever"
    assert not scheduler.has_work
    scheduler.pool.check((), ())
    return seen


def assert_as_expected(seen: Collected, requests, limits: Limits = LIMITS) -> None:
    for req in requests:
        tokens, reason, stop = expected(req, limits)
        finish = seen.finished[req.request_id]
        assert seen.tokens.get(req.request_id, []) == tokens
        assert (finish.reason, finish.stop_token_id) == (reason, stop)
        generated = len(tokens) + (stop is not None)
        assert finish.usage == Usage(len(req.prompt_token_ids), generated)


class Oracle:
    """Drafts that are right up to a point that depends on the position."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        tokens = tuple(sequence.tokens)
        guesses: list[int] = []
        for i in range(most):
            token = next_token(tokens, VOCAB)
            guesses.append(token if (len(tokens) + i) % 3 else (token + 1) % VOCAB)
            tokens += (token,)
        return tuple(guesses)
