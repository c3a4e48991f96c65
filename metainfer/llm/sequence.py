"""Sequence: what the scheduler knows of one request. No torch."""

from __future__ import annotations

from metainfer.arch.cache_kinds import blocks_for
from metainfer.core.events import Usage
from metainfer.llm.blocks import InvariantError
from metainfer.llm.request import Request


class Sequence:
    """A request on its way. The one idea: `computed` tokens are in the cache, `known` ones are
    known, and the scheduler hands out rows until they meet; sampling then makes one more known.

    What a step will have done counts as done once the step is made, though its results come later:
    the tokens that it samples are known to the device before the host has read them.

    Attributes:
        tokens: prompt and output so far, as far as results were read.
        unread: tokens behind these that steps in flight sample, at most.
        max_total: tokens at which it ends.
        stop_ids: tokens that end it.
        order: smaller is served earlier.
        computed: tokens whose state is in the cache once the steps in flight are done.
        life: how often it lost its cache.
        blocks, slot: what it holds of the cache; slot None means that it holds nothing and waits.
        drafts: guessed next tokens to verify in the next step; not known yet.
        served_at: smaller means that it was given rows longer ago; no two are equal.
        introduced: the runner has been told of it.
        wants_prompt_logprobs: and has not got them yet.
    """

    __slots__ = (
        "blocks",
        "computed",
        "drafts",
        "introduced",
        "life",
        "max_total",
        "num_prompt",
        "order",
        "request",
        "served_at",
        "slot",
        "stop_ids",
        "tokens",
        "unread",
        "wants_prompt_logprobs",
    )

    def __init__(
        self, request: Request, order: tuple[int, int], max_total: int, stop_ids: frozenset[int]
    ) -> None:
        self.request = request
        self.order = order
        self.max_total = max_total
        self.stop_ids = stop_ids
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.unread = 0
        self.computed = 0
        self.life = 0
        self.blocks: tuple[int, ...] = ()
        self.slot: int | None = None
        self.drafts: tuple[int, ...] = ()
        self.served_at = -1
        self.introduced = False
        self.wants_prompt_logprobs = request.sampling.prompt_logprobs is not None

    @property
    def known(self) -> int:
        """Tokens that are known, on the device at least."""
        return len(self.tokens) + self.unread

    @property
    def pending(self) -> int:
        """Known tokens that are not in the cache."""
        return self.known - self.computed

    @property
    def must_wait(self) -> bool:
        """Whether results must be read before it can go on: it is at its end unless they say
        otherwise, or all that is unread would have to be computed again."""
        return self.unread > 0 and (self.slot is None or self.known >= self.max_total)

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt, len(self.tokens) - self.num_prompt)

    def lose_cache(self) -> None:
        """Forget what was computed; what is known stays."""
        self.computed = 0
        self.life += 1
        self.blocks = ()
        self.slot = None
        self.drafts = ()


def check_sequence(sequence: Sequence, runs: bool, block_tokens: int) -> None:
    """Raise InvariantError if what `sequence` says of itself cannot be."""
    name = sequence.request.request_id
    if runs != (sequence.slot is not None):
        raise InvariantError(f"request {name} is in the wrong queue")
    # All of a prompt of which no token is sampled is computed while its step is in flight.
    last = sequence.known if sequence.num_prompt == sequence.max_total else sequence.known - 1
    fits = 0 <= sequence.computed <= last and sequence.known <= sequence.max_total
    if not fits or sequence.unread < 0:
        raise InvariantError(
            f"request {name} computed {sequence.computed} of {sequence.known} known tokens,"
            f" at most {sequence.max_total}"
        )
    if sequence.computed > 0 and len(sequence.blocks) < blocks_for(sequence.computed, block_tokens):
        raise InvariantError(f"request {name} lacks blocks for what it computed")
    if not runs and (sequence.blocks or sequence.computed):
        raise InvariantError(f"request {name} waits but holds a part of the cache")
