"""A long prompt held against the references at some of its positions.

The prompt goes through the engine's own steps in chunks, then a token is decoded, over cache blocks
in random order. At sampled positions every layer is computed a second time: from its queries, from
latents and states of compressors as they were when their own rows were computed, and from the
entries that the caches hold. Where these lie is worked out here anew, from position and block
alone, so that wrong rows, windows, angles and lists show as well as wrong products.

The prompt is so much shorter than was asked for that the token behind it closes a window of every
compressor.

What one position gives is compared with the tolerance of its operation.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from metainfer.arch.cache_kinds import BLOCK_TOKENS, blocks_for
from metainfer.bench.positions_noted import Finding
from metainfer.bench.positions_watch import PositionsWatch
from metainfer.bench.traffic import draw_ids
from metainfer.core.errors import UserError
from metainfer.llm.engine import LoadedModel
from metainfer.llm.request import Request, SamplingParams
from metainfer.llm.step import SequenceStep, Step, StepKind


@dataclass(frozen=True, slots=True)
class Checked:
    """Attributes:
    tokens: of the prompt; the position behind it was decoded.
    positions: that were looked at, ascending.
    findings: one for each operation, layer and position.
    seconds: that all of it took, the prompt included.
    """

    tokens: int
    positions: tuple[int, ...]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def wrong(self) -> tuple[Finding, ...]:
        return tuple(found for found in self.findings if found.problem)

    def to_json(self) -> dict[str, Any]:
        """What was found by operation: the largest error, and that of each position."""
        ops: dict[str, dict[str, Any]] = {}
        for one in self.findings:
            of_op = ops.setdefault(
                one.op, {"checks": 0, "error": 0.0, "tolerance": 0.0, "by_position": {}}
            )
            of_op["checks"] += 1
            of_op["tolerance"] = max(of_op["tolerance"], one.tolerance)
            if one.error >= of_op["error"]:
                of_op |= {"error": one.error, "layer": one.layer, "position": one.position}
            before = of_op["by_position"].get(one.position, 0.0)
            of_op["by_position"][one.position] = max(before, one.error)
        return {
            "tokens": self.tokens,
            "positions": list(self.positions),
            "seconds": self.seconds,
            "checks": len(self.findings),
            "ops": ops,
            "wrong": [asdict(one) for one in self.wrong],
        }


def sample_positions(tokens: int, count: int, chunk: int, seed: int) -> tuple[int, ...]:
    """At most `count` positions of a prompt: its last, then by turns one just behind the start of
    a chunk, whose window began in the chunk before, and one anywhere."""
    generator = random.Random(f"positions/{seed}")
    chosen = {tokens - 1}
    starts = range(chunk, tokens, chunk)
    for number in range(10 * count):
        if len(chosen) >= min(count, tokens):
            break
        if starts and number % 2 == 0:
            near = generator.choice(starts) + generator.randrange(8)
            chosen.add(min(near, tokens - 1))
        else:
            chosen.add(generator.randrange(tokens))
    return tuple(sorted(chosen))


def closing_length(tokens: int, ratios: Sequence[int]) -> int:
    """The longest prompt, of at most so many tokens, behind which a token closes a window of every
    ratio; `tokens` where there is none."""
    all_close = math.lcm(*ratios)
    return (tokens + 1) // all_close * all_close - 1 if tokens >= all_close > 1 else tokens


def check_positions(
    loaded: LoadedModel,
    watch: PositionsWatch,
    tokens: int,
    count: int,
    seed: int,
) -> Checked:
    """Compute a prompt and a token behind it, and check `count` positions of the prompt and the
    decoded one.

    Args:
        tokens: of the prompt, which is cut to `closing_length`.
        watch: whose registry the model's layers were bound from.

    Raises UserError if the engine has no room for such a sequence.
    """
    plan, runner = loaded.plan, loaded.runner
    room = min(plan.max_model_len.value, plan.num_blocks.value * plan.block_tokens)
    if tokens >= room:
        raise UserError(
            f"a prompt of {tokens} tokens cannot be checked: the engine has room for {room}",
            hint="check a shorter one, or give more --max-model-len",
        )
    tokens = closing_length(tokens, [layer.ratio for layer in loaded.arch.layers if layer.ratio])
    began_s = time.perf_counter()
    chunk = plan.max_num_batched_tokens.value
    chunk -= chunk % BLOCK_TOKENS if chunk > BLOCK_TOKENS else 0
    generator = random.Random(f"prompt/{seed}")
    prompt = draw_ids(generator, tokens + 1, loaded.arch.vocab_size)
    blocks = generator.sample(
        range(plan.num_blocks.value), blocks_for(tokens + 1, plan.block_tokens)
    )
    positions = sample_positions(tokens, count, chunk, seed)
    watch.begin(loaded.arch, blocks, positions, tokens, plan.draft_rows.value)
    missed = runner.decode_steps.num_missed if runner.decode_steps is not None else 0
    for start in range(0, tokens, chunk):
        ids = prompt[start : min(start + chunk, tokens)]
        watch.expect(start, len(ids))
        runner.dry_run(_step(start, ids, blocks, decodes=False))
    watch.expect(tokens, 1)
    runner.dry_run(_step(tokens, prompt[tokens:], blocks, decodes=True))
    if runner.decode_steps is not None:
        runner.decode_steps.num_missed = missed  # graphs are made later
    findings = watch.end()
    return Checked(tokens, (*positions, tokens), findings, time.perf_counter() - began_s)


def _step(start: int, ids: Sequence[int], blocks: Sequence[int], decodes: bool) -> Step:
    """Some rows of the one sequence, in slot 0; the first clears it."""
    part = SequenceStep(
        request_id="positions",
        state_slot=0,
        blocks=tuple(blocks[: blocks_for(start + len(ids))]),
        start=start,
        token_ids=tuple(ids),
        sample_rows=1,
        resets_state=start == 0,
    )
    request = Request("positions", (0,), SamplingParams(temperature=0.0), 0.0)
    kind = StepKind.DECODE if decodes else StepKind.PREFILL
    return Step(0, kind, (part,), int(decodes), admitted=(request,))
