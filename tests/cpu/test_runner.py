"""Runner: what a step gives to each of its sequences, with a model that checks its inputs."""

from __future__ import annotations

import pytest
import torch

from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.runner import Runner
from metainfer.llm.step import SequenceOutput, SequenceStep, Step, StepKind
from tests.fakes.samplers import cpu_sampler
from tests.fakes.toy_model import BREAK, POISON, ToyCache, ToyModel

VOCAB, EOS = 60, 1


class Bench:
    """A runner and the steps of its requests, each with a slot and block of its own."""

    def __init__(self, slots: int = 4) -> None:
        self.model = ToyModel(VOCAB)
        self.cache = ToyCache(slots, slots)
        self.runner = Runner(
            self.model,
            self.cache,
            sampler=cpu_sampler(VOCAB, slots),
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            num_slots=slots,
            max_blocks=2,
            device=torch.device("cpu"),
        )
        self.requests: dict[str, Request] = {}
        self.known: set[str] = set()

    def request(self, name: str, prompt: list[int], **params) -> None:
        sampling = SamplingParams(**{"temperature": 0.0, **params})
        self.requests[name] = Request(name, tuple(prompt), sampling, arrival_s=0.0)

    def part(self, name: str, start: int, tokens: list[int], **more) -> SequenceStep:
        slot = list(self.requests).index(name)
        more = {"sample_rows": 1, "resets_state": start == 0, **more}
        return SequenceStep(name, slot, (slot,), start, tuple(tokens), **more)

    def run(self, *parts: SequenceStep, forgotten: tuple[str, ...] = ()) -> list[SequenceOutput]:
        ids = [part.request_id for part in parts]
        admitted = tuple(self.requests[name] for name in ids if name not in self.known)
        self.known.update(ids)
        parts = tuple(sorted(parts, key=lambda part: len(part.token_ids)))
        short = sum(len(part.token_ids) == 1 for part in parts)
        step = Step(0, StepKind.MIXED, parts, short, (), admitted, forgotten)
        return list(self.runner.execute(step).sequences)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def best(bench: Bench, tokens: list[int]) -> int:
    return int(bench.model.after(tokens).argmax())


def test_each_sequence_gets_the_token_behind_its_own_rows(bench):
    bench.request("a", [10, 11, 12])
    bench.request("b", [20])
    bench.request("c", [30, 31, 32, 33])
    outputs = bench.run(
        bench.part("a", 0, [10, 11, 12]),
        bench.part("b", 0, [20]),
        bench.part("c", 0, [30, 31], sample_rows=0),
    )
    assert [output.request_id for output in outputs] == ["b", "c", "a"]
    assert [output.token_ids for output in outputs] == [
        (best(bench, [20]),),
        (),
        (best(bench, [10, 11, 12]),),
    ]
    assert bench.model.logits_rows == [2], "logits are made of the sampled rows alone"
    (output,) = bench.run(bench.part("c", 2, [32, 33]))
    assert output.token_ids == (best(bench, [30, 31, 32, 33]),)
    assert sorted(bench.cache.resets) == [0, 1, 2]


def test_a_step_in_the_middle_of_a_prompt_makes_no_logits(bench):
    bench.request("a", [10, 11, 12])
    bench.run(bench.part("a", 0, [10, 11], sample_rows=0))
    assert bench.model.logits_rows == []


def test_log_probabilities_are_those_of_the_model(bench):
    bench.request("a", [10, 11], logprobs=3)
    (output,) = bench.run(bench.part("a", 0, [10, 11]))
    wanted_V = bench.model.after([10, 11]).log_softmax(-1)
    (found,) = output.logprobs
    assert found.token_id == output.token_ids[0]
    assert found.logprob == pytest.approx(float(wanted_V.max()), abs=1e-6)
    assert [token for token, _ in found.top] == wanted_V.topk(3).indices.tolist()


@pytest.mark.parametrize("slice_rows", [1, 2, 3, 100])
def test_log_probabilities_of_the_prompt_come_once_from_all_its_chunks(bench, slice_rows):
    prompt = [10, 11, 12, 13, 14, 15]
    bench.runner._slice_rows = slice_rows
    bench.request("a", prompt, prompt_logprobs=2)
    wants = {"prompt_logprobs": True}
    outputs = [
        *bench.run(bench.part("a", 0, prompt[:2], sample_rows=0, **wants)),
        # It is preempted and starts anew, with other chunks.
        *bench.run(bench.part("a", 0, prompt[:3], sample_rows=0, **wants)),
        *bench.run(bench.part("a", 3, prompt[3:5], sample_rows=0, **wants)),
        # With the row of the last but one token all is known; the scheduler asks no further.
        *bench.run(bench.part("a", 5, prompt[5:])),
    ]
    assert [output.prompt_logprobs is None for output in outputs] == [True, True, False, True]
    found = outputs[2].prompt_logprobs
    assert found[0] is None and len(found) == len(prompt)
    for n in range(1, len(prompt)):
        wanted_V = bench.model.after(prompt[:n]).log_softmax(-1)
        assert found[n].token_id == prompt[n]
        assert found[n].logprob == pytest.approx(float(wanted_V[prompt[n]]), abs=1e-6)
        assert [token for token, _ in found[n].top] == wanted_V.topk(2).indices.tolist()


def test_drafts_are_taken_up_to_the_first_wrong_one(bench):
    prompt = [10, 11]
    right = list(prompt)
    while len(right) < 6:
        right.append(best(bench, right))
    bench.request("a", prompt)
    bench.run(bench.part("a", 0, prompt[:1], sample_rows=0))
    drafts = [right[2], right[3], (right[4] + 1) % VOCAB]
    (output,) = bench.run(bench.part("a", 1, [prompt[1], *drafts], sample_rows=4))
    assert output.token_ids == tuple(right[2:5])


def test_penalties_see_what_was_accepted(bench):
    prompt = [10, 11]
    bench.request("a", prompt, repetition_penalty=50.0, logit_bias={17: 5.0})
    (first,) = bench.run(bench.part("a", 0, prompt))
    assert first.token_ids == (17,)
    (second,) = bench.run(bench.part("a", 2, [17]))
    logits_V = bench.model.after([10, 11, 17])
    logits_V[17] += 5.0
    for token in (10, 11, 17):
        logits_V[token] = logits_V[token] / 50 if logits_V[token] > 0 else logits_V[token] * 50
    assert second.token_ids == (int(logits_V.argmax()),)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}, {"prompt_logprobs": 1}])
def test_logits_that_are_not_numbers_cost_their_own_sequence_alone(bench, params):
    bench.request("bad", [10, POISON, 12], **params)
    bench.request("good", [20, 21], **params)
    wants = {"prompt_logprobs": "prompt_logprobs" in params}
    good, bad = bench.run(
        bench.part("bad", 0, [10, POISON, 12], **wants), bench.part("good", 0, [20, 21], **wants)
    )
    assert bad.error is not None and "not finite" in bad.error and bad.token_ids == ()
    assert good.error is None and len(good.token_ids) == 1


def test_an_error_of_the_model_is_raised_and_moves_nobody(bench):
    bench.request("a", [10], seed=3)
    bench.request("b", [BREAK])
    bench.run(bench.part("a", 0, [10]))
    with pytest.raises(RuntimeError, match="broke"):
        bench.run(bench.part("a", 1, [11]), bench.part("b", 0, [BREAK]))
    (output,) = bench.run(bench.part("a", 1, [11]))
    assert output.token_ids == (best(bench, [10, 11]),)


def test_what_is_forgotten_is_gone(bench):
    bench.request("a", [10])
    bench.request("b", [20])
    bench.run(bench.part("a", 0, [10]))
    bench.run(bench.part("b", 0, [20]), forgotten=("a", "never seen"))
    assert set(bench.runner._states) == {"b"}


def test_errors_of_the_device_are_fatal_and_others_are_not(bench):
    assert bench.runner.is_fatal(torch.AcceleratorError("lost", 700))
    assert not bench.runner.is_fatal(torch.OutOfMemoryError("full"))
    assert not bench.runner.is_fatal(RuntimeError("a shape"))
