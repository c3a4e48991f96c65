"""Scheduler: which sequence computes how many rows in the next step, with which blocks.

It knows one idea, "computed < known": rows are given to sequences until the cache holds all known
tokens, and then a sampled token becomes known. A decoding sequence is one with a single pending
token; a prompt, or a sequence that lost its cache, has more. Preemption drops what was computed
and keeps what is known, so nothing is lost and recomputing it is ordinary work. No torch.

A step may be made before the results of the one before it are read: what is certain of them counts
as done, and a token that is not known yet is asked of the device (`step.IN_FLIGHT`). A sequence
that those results turn out to have ended has computed a row too much, which is dropped.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, replace

from metainfer.arch.cache_kinds import blocks_for
from metainfer.core.events import EngineEvent, FinishEvent, FinishReason, PromptEvent, TokenEvent
from metainfer.llm.admission import Limits, check_request, max_total_tokens
from metainfer.llm.assignment import Assignment, decode_turn, sequence_step
from metainfer.llm.blocks import BlockPool, InvariantError
from metainfer.llm.counters import Counters
from metainfer.llm.policy import Policies
from metainfer.llm.request import Request
from metainfer.llm.sequence import Sequence, check_sequence
from metainfer.llm.step import SequenceOutput, SequenceStep, Step, StepKind, StepOutput


@dataclass(frozen=True, slots=True)
class _Passenger:
    """A sequence that a step in flight has rows of, and which of its lives they belong to."""

    sequence: Sequence
    life: int


class Scheduler:
    """Used by one thread. Each `step()` is followed by `update()` or `fail()`, in the order of the
    steps; other steps may be made before. `add()` and `abort()` may come at any time between."""

    def __init__(self, limits: Limits, policies: Policies | None = None) -> None:
        if limits.max_num_batched_tokens < 2:
            raise InvariantError("a step needs at least 2 rows: one for prefill, one for decode")
        self.limits = limits
        self.counters = Counters()
        self.pool = BlockPool(limits.num_blocks, limits.max_num_seqs)
        self._block_tokens = limits.block_tokens
        self._policies = policies if policies is not None else Policies()
        self._live: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # in queue order, each with a slot
        self._waiting: list[Sequence] = []  # in queue order, holding nothing
        self._forgotten: list[str] = []
        self._flights: dict[int, tuple[_Passenger, ...]] = {}  # by number of step
        self._arrivals = 0
        self._services = 0

    # ---- requests ----

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, request: Request) -> None:
        """Queue `request`. Raises RequestError if it can never be served, InvariantError if its id
        is in use."""
        check_request(request, self.limits)
        if request.request_id in self._live:
            raise InvariantError(f"request id {request.request_id} is in use")
        sampling = request.sampling
        ends = () if sampling.ignore_eos else self.limits.eos_token_ids
        sequence = Sequence(
            request,
            self._policies.order.key(request, self._arrivals),
            max_total_tokens(request, self.limits),
            frozenset((*ends, *sampling.stop_token_ids)),
        )
        self._arrivals += 1
        self._live[request.request_id] = sequence
        insort(self._waiting, sequence, key=_order)

    def abort(self, request_id: str) -> list[EngineEvent]:
        """End a request in whatever state it is; its cache is free at once. Unknown: no events."""
        sequence = self._live.get(request_id)
        return [] if sequence is None else [self._finish(sequence, FinishReason.ABORT)]

    def fail(self, step: Step, error: str) -> list[EngineEvent]:
        """End all requests of a step that could not be computed."""
        events: list[EngineEvent] = []
        for passenger in self._land(step):
            if self._is_live(passenger.sequence):
                events.append(self._finish(passenger.sequence, FinishReason.ERROR, error=error))
        return events

    def lose_all(self, error: str) -> list[EngineEvent]:
        """All that was computed is lost, with the steps in flight: requests that ever ran end with
        `error`, the others go on to wait. Nobody has to be told which were forgotten."""
        self._flights.clear()
        lost = [sequence for sequence in self._live.values() if sequence.introduced]
        for sequence in lost:
            sequence.unread = 0
        events: list[EngineEvent] = [self._finish(s, FinishReason.ERROR, error=error) for s in lost]
        self._forgotten.clear()
        return events

    def end_all(self, reason: FinishReason, error: str | None = None) -> list[EngineEvent]:
        """End every request."""
        return [self._finish(s, reason, error=error) for s in list(self._live.values())]

    # ---- the next step ----

    def step(self) -> Step | None:
        """The next step; None if there is no request. While there is one, there is a step, unless
        all must wait for the results of steps in flight."""
        assignment = Assignment(self.limits.max_num_batched_tokens)
        most = self._policies.pace.prefill_rows(assignment.left)
        self._serve_decodes(assignment, most > 0)
        # Where nothing decodes there is nobody to wait for.
        most = min(most, assignment.left) if assignment.rows else assignment.left
        self._serve_prefills(assignment, most)
        if not assignment.rows:
            if self._live and not self._flights:
                raise InvariantError(f"none of {len(self._live)} requests could be given a row")
            return None
        return self._build(assignment)

    def _serve_decodes(self, assignment: Assignment, may_prefill: bool) -> None:
        """One row (and the drafted ones) for each sequence with a single pending token, or for as
        many as leave work for other stages. Where not all can have one, those served longest ago
        come first."""
        decodes = [s for s in self._running if s.pending == 1 and not self._must_wait(s)]
        for sequence in decodes if self._policies.drafter is not None else ():
            self._draft(sequence)
        wanted = sum(1 + len(s.drafts) for s in decodes)
        can_admit = bool(self._waiting) and self.pool.slots.num_free > 0
        prefill_waits = can_admit or any(s.pending > 1 for s in self._running)
        quota = self._policies.split.decode_rows(assignment.left, prefill_waits and may_prefill)
        quota = min(quota, decode_turn(self._running, self.limits))
        if wanted > quota:
            decodes.sort(key=lambda s: s.served_at)
        for sequence in decodes:
            if sequence.slot is None:  # gave its cache to an older one a moment ago
                continue
            if quota < 1 + len(sequence.drafts):
                sequence.drafts = ()
            rows = 1 + len(sequence.drafts)
            if quota < rows:
                break
            if self._reserve(sequence, rows, assignment):
                assignment.give(sequence, rows)
                quota -= rows

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether results of a step in flight must be read first. Drafting needs all tokens, and
        so does the first stage of a pipeline, where none are drawn."""
        needs_all = self._policies.drafter is not None or self.limits.stages > 1
        return sequence.must_wait or (needs_all and sequence.unread > 0)

    def _draft(self, sequence: Sequence) -> None:
        most = min(self.limits.draft_rows, sequence.max_total - len(sequence.tokens) - 1)
        drafter = self._policies.drafter
        sequence.drafts = drafter.propose(sequence, most) if drafter and most > 0 else ()

    def _serve_prefills(self, assignment: Assignment, most: int) -> None:
        """Split `most` rows among prompts that run and prompts that can be admitted."""
        candidates = [
            *(s for s in self._running if s.pending > 1 and not self._must_wait(s)),
            *self._admissible(assignment),
        ]
        candidates.sort(key=_order)
        shares = self._policies.split.prefill_rows([s.pending for s in candidates], most)
        for sequence, share in zip(candidates, shares, strict=True):
            if share == 0 or sequence in assignment.preempted:
                continue
            if sequence.slot is None:
                if assignment.preempted or not self.pool.blocks.num_free:
                    continue
                self._admit(sequence)
            rows = self._reserve_up_to(sequence, share, assignment)
            if rows > 0:
                assignment.give(sequence, rows)

    def _admissible(self, assignment: Assignment) -> list[Sequence]:
        """Waiting sequences, in order, for which there is a slot and room for all their known
        tokens, counting what running prompts will still need and a block for each running sequence
        to grow into. The first that does not fit keeps those behind it waiting, or it might wait
        for ever."""
        if assignment.preempted:
            return []
        room = self.pool.blocks.num_free - sum(self._missing_blocks(s) for s in self._running)
        admissible: list[Sequence] = []
        for sequence in self._waiting[: self.pool.slots.num_free]:
            room -= blocks_for(sequence.known, self._block_tokens)
            if sequence.must_wait or room < len(self._running) + len(admissible):
                break
            admissible.append(sequence)
        return admissible

    def _missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for its known tokens."""
        return max(0, blocks_for(sequence.known, self._block_tokens) - len(sequence.blocks))

    def _admit(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_order)
        (sequence.slot,) = self.pool.slots.allocate(1)

    # ---- blocks ----

    def _reserve(self, sequence: Sequence, rows: int, assignment: Assignment) -> bool:
        """Blocks for `rows` more rows, preempting others where the policy says so."""
        missing = blocks_for(sequence.computed + rows, self._block_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        while missing > self.pool.blocks.num_free:
            victim = self._policies.victim.choose(self._running, sequence)
            if victim is None:
                return False
            self._preempt(victim)
            assignment.take_back(victim)
        sequence.blocks += self.pool.blocks.allocate(missing)
        return True

    def _reserve_up_to(self, sequence: Sequence, rows: int, assignment: Assignment) -> int:
        """Like `_reserve`, but content with fewer rows; returns how many."""
        if self._reserve(sequence, rows, assignment):
            return rows
        held = len(sequence.blocks) + self.pool.blocks.num_free
        rows = min(rows, held * self._block_tokens - sequence.computed)
        return rows if rows > 0 and self._reserve(sequence, rows, assignment) else 0

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._free(sequence)
        sequence.lose_cache()
        insort(self._waiting, sequence, key=_order)
        self.counters.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.blocks.release(sequence.blocks)
        if sequence.slot is not None:
            self.pool.slots.release((sequence.slot,))

    # ---- Step ----

    def _build(self, assignment: Assignment) -> Step:
        step_id = self.counters.steps
        self.counters.steps += 1
        short: list[SequenceStep] = []
        long: list[SequenceStep] = []
        short_riders: list[_Passenger] = []
        long_riders: list[_Passenger] = []
        admitted: list[Request] = []
        for sequence, rows in assignment.rows.items():
            sequence.served_at = self._services
            self._services += 1
            if not sequence.introduced:
                sequence.introduced = True
                admitted.append(sequence.request)
            part = sequence_step(sequence, rows)
            is_short = rows <= 1 + self.limits.draft_rows
            (short if is_short else long).append(part)
            (short_riders if is_short else long_riders).append(_Passenger(sequence, sequence.life))
            sequence.computed += rows
            sequence.unread += part.sample_rows
            sequence.drafts = ()
        decode_rows = sum(len(part.token_ids) for part in short)
        prefill_rows = sum(len(part.token_ids) for part in long)
        self._policies.pace.began(step_id, decode_rows, prefill_rows)
        self._flights[step_id] = (*short_riders, *long_riders)
        forgotten, self._forgotten = tuple(self._forgotten), []
        kind = StepKind.MIXED if short and long else StepKind.DECODE if short else StepKind.PREFILL
        return Step(
            step_id,
            kind,
            (*short, *long),
            len(short),
            tuple(s.request.request_id for s in assignment.preempted),
            tuple(admitted),
            forgotten,
        )

    # ---- results ----

    def took(self, step: Step, seconds: float) -> None:
        """How long `step` kept the device busy; said before its results are taken in, or never."""
        self._policies.pace.took(step.step_id, seconds)

    def update(self, step: Step, output: StepOutput) -> list[EngineEvent]:
        """Take in what the step gave; sequences that ended meanwhile are passed over."""
        events: list[EngineEvent] = []
        riders = self._land(step)
        for part, rider, result in zip(step.sequences, riders, output.sequences, strict=True):
            if self._is_live(rider.sequence):
                events.extend(self._advance(rider, part, result))
        return events

    def _land(self, step: Step) -> tuple[_Passenger, ...]:
        """Whoever was in `step`, which is over. What it samples is not unread any more."""
        passengers = self._flights.pop(step.step_id)
        for part, passenger in zip(step.sequences, passengers, strict=True):
            passenger.sequence.unread -= part.sample_rows
        return passengers

    def _is_live(self, sequence: Sequence) -> bool:
        return self._live.get(sequence.request.request_id) is sequence

    def _advance(
        self, rider: _Passenger, part: SequenceStep, result: SequenceOutput
    ) -> Iterator[EngineEvent]:
        sequence = rider.sequence
        if result.error is not None:
            yield self._finish(sequence, FinishReason.ERROR, error=result.error)
            return
        if sequence.life == rider.life:
            # Rows of rejected drafts do not count as computed: they are written again.
            sequence.computed -= part.sample_rows - len(result.token_ids)
        # The step behind the one that completes them may have been made before that was known.
        if result.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
            sequence.wants_prompt_logprobs = False
            yield PromptEvent(part.request_id, result.prompt_logprobs)
        taken, finish = self._take_tokens(sequence, part, result.token_ids)
        if taken:
            logprobs = result.logprobs[:taken]
            yield TokenEvent(part.request_id, result.token_ids[:taken], logprobs)
        if finish is FinishReason.STOP:
            logprob = next(iter(result.logprobs[taken:]), None)
            end = self._finish(sequence, finish)
            yield replace(end, stop_token_id=result.token_ids[taken], stop_logprob=logprob)
        elif finish is not None:
            yield self._finish(sequence, finish)

    def _take_tokens(
        self, sequence: Sequence, part: SequenceStep, token_ids: tuple[int, ...]
    ) -> tuple[int, FinishReason | None]:
        """Make tokens known up to the one that ends the sequence; (how many to report, ending).
        A stop token is known and counted, but not reported as output."""
        if token_ids and len(sequence.tokens) == sequence.num_prompt:
            self.counters.prompt_tokens += sequence.num_prompt
        for i, token_id in enumerate(token_ids):
            sequence.tokens.append(token_id)
            self.counters.generation_tokens += 1
            if token_id in sequence.stop_ids:
                return i, FinishReason.STOP
            if len(sequence.tokens) == sequence.max_total:
                return i + 1, FinishReason.LENGTH
        if part.start + len(part.token_ids) == sequence.max_total:  # max_tokens is 0
            self.counters.prompt_tokens += sequence.num_prompt
            return 0, FinishReason.LENGTH
        return len(token_ids), None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None
    ) -> FinishEvent:
        request_id = sequence.request.request_id
        (self._waiting if sequence.slot is None else self._running).remove(sequence)
        self._free(sequence)
        sequence.lose_cache()
        del self._live[request_id]
        if sequence.introduced:
            self._forgotten.append(request_id)
        counters = self.counters
        counters.aborted += reason is FinishReason.ABORT
        counters.errors += reason is FinishReason.ERROR
        counters.finished += reason not in (FinishReason.ABORT, FinishReason.ERROR)
        return FinishEvent(request_id, reason, sequence.usage, error=error)

    # ---- invariants ----

    def check_idle(self) -> None:
        """Raise InvariantError if something is held while there is no request. Quick."""
        self.pool.check_all_free()

    def check(self) -> None:
        """Raise InvariantError if queues, sequences and pool disagree. Slow with many blocks."""
        for queue, runs in ((self._running, True), (self._waiting, False)):
            if [s.order for s in queue] != sorted(s.order for s in queue):
                raise InvariantError("a queue is out of order")
            for sequence in queue:
                check_sequence(sequence, runs, self._block_tokens)
        queued = [s.request.request_id for s in self._running + self._waiting]
        if sorted(queued) != sorted(self._live):
            raise InvariantError("the queues do not hold exactly the live requests")
        self.pool.check(
            (block for s in self._running for block in s.blocks),
            (s.slot for s in self._running if s.slot is not None),
        )


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
