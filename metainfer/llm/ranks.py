"""GroupRunner: executes steps on all ranks of an engine, of which it is the first."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from metainfer.comm.group import GroupError
from metainfer.core.errors import MetainferError
from metainfer.llm.flight import Flight
from metainfer.llm.graphs import DecodeSteps
from metainfer.llm.meeting import StandingGroup
from metainfer.llm.rank_crew import RankCrew, RankLostError
from metainfer.llm.rank_orders import (
    Alike,
    Capture,
    Done,
    DryRun,
    Failed,
    Forget,
    Launch,
    Meet,
    Meeting,
    Order,
    digest,
    sentence,
)
from metainfer.llm.request import Request
from metainfer.llm.runner import Runner
from metainfer.llm.step import Step, StepOutput
from metainfer.llm.step_wire import StepSender
from metainfer.llm.threads import InOrder
from metainfer.nn.cache import CacheStorage

T = TypeVar("T")

_PATIENCE_S = 2.0
"""For answers of ranks that failed too; the others wait for this one in vain, and are told so."""

_LONGEST_END_S = 20.0
"""For answers of ranks that know that all is over."""

_KEPT_DIGESTS = 64

_log = logging.getLogger(__name__)


class RankFailedError(MetainferError):
    """A rank could not compute a step; all of them live and can go on."""


class GroupRunner:
    """An executor of the loop. Used by one thread.

    Whatever happens in a step happens to all ranks: a step that failed on one of them has failed,
    and the ranks meet anew before the next one. A rank that ends takes the model with it.

    Args:
        runner: of this process, which is rank 0, over `group`.
        crew: the other ranks, which have loaded their parts.
        meet: makes a meeting for all of them.
        stages: of a pipeline that the ranks are.
        apart: where this rank's part is computed behind what is launched, so that stages work at
            the same time; None where it is queued on a GPU, or there is one stage.
        may_meet_again: False where work that was queued, or graphs, would still use the group that
            they left.
    """

    def __init__(
        self,
        runner: Runner[CacheStorage],
        group: StandingGroup,
        crew: RankCrew,
        meet: Callable[[], Meeting],
        *,
        stages: int = 1,
        apart: InOrder | None = None,
        may_meet_again: bool = True,
    ) -> None:
        self._runner = runner
        self._group = group
        self._crew = crew
        self._make_meeting = meet
        self._captures = False
        self._stages = stages
        self._apart = apart
        self._sender = StepSender()
        self._may_meet_again = may_meet_again
        self._unread: deque[GroupFlight] = deque()
        self._reads = 0  # of results, that the others do not know of yet
        self._expected: dict[int, int] = {}  # digests of results, by step
        self._meet()

    @property
    def decode_steps(self) -> DecodeSteps[CacheStorage] | None:
        """Of this rank."""
        return self._runner.decode_steps

    @property
    def decodes_without_graph(self) -> int:
        return self._runner.decodes_without_graph

    def execute(self, step: Step) -> StepOutput:
        return self.launch(step).wait()

    def launch(self, step: Step) -> GroupFlight:
        """As `Runner.launch`, on all ranks. Raises what it raises, or RankFailedError where that
        was on another rank, or RankLostError."""
        self._crew.check()
        step = with_seeds(step)
        self._tell_reads(step)
        made = GroupFlight(self, step)
        try:
            made.flight = self._begin(lambda: self._runner.launch(step))
        except Exception as error:
            raise self._after(error, made) from error
        self._unread.append(made)
        return made

    def renew(self, crew: RankCrew) -> None:
        """Go on with other processes, which have loaded too. Nothing is known of any request."""
        self._crew = crew
        self._await_own()
        self._unread.clear()
        self._expected.clear()
        self._reads = 0
        self._sender = StepSender()
        self._runner.forget_all()
        self._meet()
        if self._captures:  # graphs hold the group that is gone
            self.capture()

    def capture(self) -> None:
        self._captures = True
        self._do(Capture(), self._runner.capture)

    def dry_run(self, step: Step) -> None:
        self._do(DryRun(step), lambda: self._runner.dry_run(step))

    def is_fatal(self, error: Exception) -> bool:
        return isinstance(error, RankLostError) or self._runner.is_fatal(error)

    def read(self, made: GroupFlight) -> StepOutput:
        """The results of the oldest step that was not read, once all ranks have launched it.
        Raises as `launch` does."""
        if made.failure is not None:
            self._unread.remove(made)
            raise made.failure
        assert self._unread[0] is made and made.flight is not None, "flights are read in order"
        try:
            flight = made.flight.result()
        except Exception as error:
            raise self._after(error, made) from error
        self._settle(made)
        self._unread.popleft()
        self._reads += 1
        scores = any(part.prompt_logprobs for part in made.step.sequences)
        if scores:  # by logits, for which all ranks are needed
            self._tell_reads(None)
        try:
            output = self._begin(flight.wait).result() if scores else flight.wait()
            if scores:
                self._take(self._crew.answers())
        except RankLostError:
            raise
        except Exception as error:
            raise self._after(error, made) from error
        self._expected[made.step.step_id] = digest(output)
        return output

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        """Of this rank: done when this returns, or behind all that was begun before."""
        if self._apart is not None:
            return self._apart.begin(work)
        done: Future[T] = Future()
        done.set_result(work())
        return done

    def _await_own(self) -> None:
        """All that was begun is over."""
        self._begin(lambda: None).result()

    def _tell_reads(self, step: Step | None) -> None:
        """Launch a step on the other ranks, behind what they have not read yet."""
        reads, self._reads = self._reads, 0
        self._crew.tell(Launch(reads, None if step is None else self._sender.packed(step)))

    def _settle(self, made: GroupFlight) -> None:
        """All ranks have launched a step, or it has failed on all."""
        if made.settled:
            return
        answers = self._crew.answers()
        made.settled = True
        if any(isinstance(answer, Failed) for answer in answers.values()):
            raise self._after(None, made, answers)
        self._take(answers)

    def _take(self, answers: Mapping[int, Done | Failed]) -> None:
        """Compare what ranks have read with what this one has."""
        for rank, answer in answers.items():
            if isinstance(answer, Failed):
                raise RankLostError(f"rank {rank} failed: {answer.error}")
            for step_id, found in answer.digests:
                if self._expected.get(step_id, found) != found:
                    raise RankLostError(f"rank {rank} and rank 0 drew other tokens in a step")
        if len(self._expected) > _KEPT_DIGESTS:
            for step_id in list(self._expected)[:-_KEPT_DIGESTS]:
                del self._expected[step_id]

    def _after(
        self,
        error: Exception | None,
        made: GroupFlight,
        answers: Mapping[int, Done | Failed] | None = None,
    ) -> Exception:
        """Make all ranks fit for the next step, after one that has failed on some of them.

        Args:
            error: of this rank; None where it launched the step.
            answers: of the others to that step, where they are known.

        Returns what the step failed with.
        """
        if self._stages > 1:  # which are at different steps
            self._group.abort(f"rank 0 failed: {sentence(error)}" if error else "a rank failed")
            self._await_own()
        elif error is not None and not isinstance(error, GroupError):
            with suppress(RankLostError):  # which is found out below
                self._crew.tell(Alike(self._group.calls))
        others = [one for one in self._unread if one is not made]
        self._unread = deque(others)
        failed = [made]
        try:
            self._crew.settle(suspects=isinstance(error, GroupError))
            if self._apart is not None and not made.settled:  # it was told before the others
                answers, made.settled = self._final_answers(error), True
            failed += [one for one in others if not self._is_sound(one, error)]
            answers = answers or self._final_answers(error)
            failures = {r: one for r, one in answers.items() if isinstance(one, Failed)}
            cause = _cause(error, failures)
            lost = next((rank for rank, one in failures.items() if one.lost), None)
            if lost is not None:
                return RankLostError(f"the device of rank {lost} failed: {failures[lost].error}")
            if not self._in_step(error, failures):
                if not self._may_meet_again:
                    return RankLostError(f"ranks cannot go on after that: {cause}")
                self._meet_anew([one.step for one in failed], str(cause))
        except RankLostError as lost_error:
            return lost_error
        for one in failed[1:]:
            one.failure = RankFailedError(str(cause))
        return cause

    def _is_sound(self, made: GroupFlight, error: Exception | None) -> bool:
        """Whether a step that was launched before the one that failed is there on all ranks."""
        if made.settled:
            return made.failure is None
        answers = self._final_answers(error)
        made.settled = True
        failed = any(isinstance(answer, Failed) for answer in answers.values())
        return not failed and self._stages == 1

    def _final_answers(self, error: Exception | None) -> Mapping[int, Done | Failed]:
        """To an order that has failed: others failed alike, or wait for this rank in vain."""
        if not self._crew.ready(_PATIENCE_S):
            self._group.abort(f"rank 0 failed: {sentence(error)}" if error else "rank 0 gave up")
        return self._crew.answers(_LONGEST_END_S)

    def _in_step(self, error: Exception | None, failures: Mapping[int, Failed]) -> bool:
        """Whether all ranks failed at the same place, by themselves: nobody waits for anybody."""
        if error is None or isinstance(error, GroupError) or len(failures) < self._group.size - 1:
            return False
        if self._stages > 1:
            return False
        return not any(one.apart for one in failures.values())

    def _meet_anew(self, failed: Sequence[Step], why: str) -> None:
        _log.warning("the ranks meet anew, since one failed: %s", why)
        self._group.abort(why)
        for step in failed:
            self._crew.tell(Forget(step.step_id))
            self._take(self._crew.answers())
        self._meet()

    def _meet(self) -> None:
        meeting = self._make_meeting()
        self._crew.tell(Meet(meeting))
        try:
            self._group.meet(meeting.join(0))
        except GroupError as error:
            self._crew.settle(suspects=True)
            raise RankLostError(f"the ranks do not meet: {error}") from error
        self._take(self._crew.answers())

    def _do(self, order: Order, own: Callable[[], None]) -> None:
        """Outside of requests: whatever fails is the end."""
        self._crew.check()
        self._crew.tell(order)
        try:
            own()
        except Exception as error:
            self._crew.settle(suspects=isinstance(error, GroupError))
            answers = self._final_answers(error)
            raise _cause(
                error, {r: one for r, one in answers.items() if isinstance(one, Failed)}
            ) from error
        self._take(self._crew.answers())


class GroupFlight:
    """A step that all ranks compute, or have computed.

    Attributes:
        flight: of this rank.
        settled: it is known how other ranks launched it.
        failure: why its results are not there, where they are not.
    """

    def __init__(self, ranks: GroupRunner, step: Step) -> None:
        self.step = step
        self.flight: Future[Flight] | None = None
        self.settled = False
        self.failure: Exception | None = None
        self._ranks = ranks

    def wait(self) -> StepOutput:
        return self._ranks.read(self)


def _cause(error: Exception | None, failures: Mapping[int, Failed]) -> Exception:
    """Of all that ranks say, what the others only suffered from."""
    if error is not None and not isinstance(error, GroupError):
        return error
    for rank, failure in failures.items():
        if not failure.by_group:
            return RankFailedError(f"rank {rank} failed: {failure.error}")
    if error is not None:
        return error
    rank, failure = next(iter(failures.items()))
    return RankFailedError(f"rank {rank}: {failure.error}")


def with_seeds(step: Step) -> Step:
    """`step`, whose requests all have seeds, so that every rank draws alike."""
    if all(request.sampling.seed is not None for request in step.admitted):
        return step
    return replace(step, admitted=tuple(_with_seed(request) for request in step.admitted))


def _with_seed(request: Request) -> Request:
    if request.sampling.seed is not None:
        return request
    sampling = replace(request.sampling, seed=secrets.randbits(63))
    return replace(request, sampling=sampling)
