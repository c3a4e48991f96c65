"""Sequence: what the scheduler knows of one request. No torch."""

from __future__ import annotations

from metainfer.core.events import Usage
from metainfer.llm.request import Request


class Sequence:
    """A request on its way. The one idea: `computed` tokens are in the cache, `tokens` are known,
    and the scheduler hands out rows until they meet; sampling then makes one more known.

    Attributes:
        tokens: prompt and output so far; the last one is not in the cache yet.
        max_total: tokens at which it ends.
        stop_ids: tokens that end it.
        order: smaller is served earlier.
        computed: tokens whose state is in the cache.
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
        "max_total",
        "num_prompt",
        "order",
        "request",
        "served_at",
        "slot",
        "stop_ids",
        "tokens",
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
        self.computed = 0
        self.blocks: tuple[int, ...] = ()
        self.slot: int | None = None
        self.drafts: tuple[int, ...] = ()
        self.served_at = -1
        self.introduced = False
        self.wants_prompt_logprobs = request.sampling.prompt_logprobs is not None

    @property
    def pending(self) -> int:
        """Known tokens that are not in the cache."""
        return len(self.tokens) - self.computed

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt, len(self.tokens) - self.num_prompt)

    def lose_cache(self) -> None:
        """Forget what was computed; what is known stays."""
        self.computed = 0
        self.blocks = ()
        self.slot = None
        self.drafts = ()
