"""metainfer as one side of compare_llama.py: JSON lines in on stdin, JSON lines out.

Commands are {"do", "prompt", "argument"}; answers:

    prefill: a prompt up to its first new token -> {"tokens" (the prompt's), "seconds"}
    decode: `argument` greedy tokens after a prompt -> {"tokens", "seconds"} of those after the first
    greedy: as many greedy tokens -> {"ids", "logprobs", "margins"}; a margin is the distance in
        log-probability from the token to the second likeliest
    follow (llama.cpp's alone): the tokens of `argument` after a prompt, whatever it would say itself
        -> {"ids" (what it would have said), "logprobs" (of the tokens given)}
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metainfer.core.events import FinishEvent, FinishReason, TokenEvent
from metainfer.llm.engine import Engine
from metainfer.llm.request import Request, SamplingParams
from metainfer.plan.settings import EngineSettings


class EngineSide:
    """The engine, with one sequence at a time.

    Args (of `setup`): directory, dtype (None leaves it to the plan), threads, max_model_len.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        settings = EngineSettings(
            device="cpu",
            dtype=setup["dtype"],
            threads=setup["threads"],
            max_model_len=setup["max_model_len"],
            max_num_seqs=1,
        )
        started_s = time.perf_counter()
        self.engine = Engine.load(Path(setup["directory"]), settings)
        self.load_s = time.perf_counter() - started_s
        self._numbers = itertools.count()

    def prefill(self, prompt: list[int], count: int) -> dict[str, Any]:
        del count
        started_s = time.perf_counter()
        for _ in self._generate(prompt, 1):
            pass
        return {"tokens": len(prompt), "seconds": time.perf_counter() - started_s}

    def decode(self, prompt: list[int], count: int) -> dict[str, Any]:
        first_s = last_s = None
        tokens = 0
        for event in self._generate(prompt, count):
            last_s = time.perf_counter()
            if first_s is None:
                first_s = last_s
            else:
                tokens += len(event.token_ids)
        assert first_s is not None and last_s is not None
        return {"tokens": tokens, "seconds": last_s - first_s}

    def greedy(self, prompt: list[int], count: int) -> dict[str, Any]:
        events = self._generate(prompt, count, logprobs=2)
        said = [logprob for event in events for logprob in event.logprobs]
        return {
            "ids": [entry.token_id for entry in said],
            "logprobs": [entry.logprob for entry in said],
            "margins": [entry.top[0][1] - entry.top[1][1] for entry in said],
        }

    def _generate(self, prompt: list[int], count: int, logprobs: int | None = None) -> Iterator[TokenEvent]:
        """The token events of one greedy request, which ends when `count` tokens are there."""
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=logprobs)
        request_id = f"peer-{next(self._numbers)}"
        self.engine.submit(Request(request_id, tuple(prompt), sampling, time.monotonic()))
        while True:
            for event in self.engine.events():
                if isinstance(event, TokenEvent):
                    yield event
                elif isinstance(event, FinishEvent):
                    if event.reason is not FinishReason.LENGTH:
                        raise SystemExit(f"metainfer ended with {event.reason}: {event.error}")
                    return


def main() -> None:
    # Replies go to the real stdout; whatever libraries print goes to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(record: dict[str, Any]) -> None:
        replies.write(json.dumps(record) + "\n")
        replies.flush()

    side = EngineSide(json.loads(sys.argv[1]))
    with side.engine:
        plan = {name: value.value for name, value in side.engine.plan.items()}
        reply({"load_s": side.load_s, "about": {"plan": plan}})
        for line in sys.stdin:
            command = json.loads(line)
            reply(getattr(side, command["do"])(command["prompt"], command["argument"]))


if __name__ == "__main__":
    main()
