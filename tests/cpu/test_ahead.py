"""Steps that are launched before the results of the one before are read give the same tokens, and
the same log-probabilities, as steps one by one: whatever requests ask for, preempted or not."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from metainfer.core.events import FinishEvent, PromptEvent, TokenEvent
from metainfer.llm.admission import Limits
from metainfer.llm.loop import Loop
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.runner import Runner
from metainfer.llm.scheduler import Scheduler
from metainfer.llm.step import IN_FLIGHT, Step
from tests.fakes.samplers import cpu_sampler
from tests.fakes.toy_model import POISON, ToyCache, ToyModel

VOCAB, EOS = 60, 1
LIMITS = Limits(
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    max_model_len=500,
    max_num_seqs=5,
    max_num_batched_tokens=64,
    max_queued_requests=100,
    num_blocks=6,
)


class Counting(Runner[ToyCache]):
    """Counts tokens that were read on the device alone."""

    num_unread = 0

    def launch(self, step: Step):
        self.num_unread += sum(part.token_ids[0] == IN_FLIGHT for part in step.sequences)
        return super().launch(step)


class Restless(Scheduler):
    """Takes the cache of the newest sequence every few steps, results read or not."""

    def step(self) -> Step | None:
        if self.counters.steps % 7 == 6 and self.num_running > 1:
            self._preempt(self._running[-1])
        return super().step()


def some_request(number: int, luck: random.Random) -> Request:
    """Of all kinds; most end by a stop token or by their length in the middle of things."""
    prompt = [luck.randrange(5, VOCAB) for _ in range(luck.choice([1, 9, 70, 110, 120, 125, 250]))]
    if luck.random() < 0.1:
        prompt[-1] = POISON
    asked: dict[str, Any] = {"seed": number, "max_tokens": luck.choice([0, 1, 2, 20, 50, 60])}
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 5, "min_p": 0.05},
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
        {"min_tokens": min(6, asked["max_tokens"]), "stop_token_ids": (7, 8, 9)},
        {"logit_bias": {11: 4.0, 12: 4.5}, "repetition_penalty": 1.3},
        {"allowed_token_ids": tuple(range(20, 40)), "ignore_eos": True},
        {"ignore_eos": True},
        {"ignore_eos": True},
    ]
    for one in luck.sample(choices, luck.randrange(1, 4)):
        asked |= one
    return Request(f"r{number}", tuple(prompt), SamplingParams(**asked), 0.0, luck.randrange(2))


def answers(ahead: bool, requests: list[Request], limits: Limits = LIMITS) -> tuple[dict, Any, Any]:
    """By request, tokens with their log-probabilities and how it ended; runner and statistics."""
    runner = Counting(
        ToyModel(VOCAB),
        ToyCache(limits.max_num_seqs, limits.num_blocks),
        sampler=cpu_sampler(VOCAB, limits.max_num_seqs),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        num_slots=limits.max_num_seqs,
        max_blocks=4,
        device=torch.device("cpu"),
    )
    loop = Loop(Restless(limits), runner, ahead=ahead, check_every_step=True)
    thread = threading.Thread(target=loop.run, daemon=True)
    for request in requests:
        loop.submit(request)
    thread.start()
    said: dict[str, list] = {request.request_id: [] for request in requests}
    left = len(requests)
    while left:
        events = loop.events(60)
        assert events, "the loop has nothing more to say"
        for event in events:
            told = said[event.request_id]
            match event:
                case TokenEvent():
                    told += zip(event.token_ids, event.logprobs or event.token_ids, strict=True)
                case PromptEvent():
                    told.append(event)
                case FinishEvent():
                    told.append((event.reason, event.stop_token_id, event.usage, event.error))
                    left -= 1
    stats = loop.stats()
    loop.close()
    thread.join(20)
    return said, runner, stats


@pytest.mark.parametrize("seed", range(3))
def test_any_requests_are_answered_alike(seed: int) -> None:
    luck = random.Random(seed)
    requests = [some_request(number, luck) for number in range(20)]
    by_steps, _, stats = answers(False, requests)
    ahead, runner, stats_ahead = answers(True, requests)
    assert ahead == by_steps
    assert stats_ahead.num_free_blocks == stats.num_free_blocks == LIMITS.num_blocks
    assert stats_ahead.generation_tokens == stats.generation_tokens
    assert stats_ahead.prompt_tokens == stats.prompt_tokens
    # What the comparison is worth.
    assert runner.num_unread > 50 and stats_ahead.num_preemptions > 3
    assert {told[-1][0] for told in ahead.values()} >= {"stop", "length"}
