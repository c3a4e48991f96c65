"""What the routes of one server share: engine, tokenizer, model facts, limits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from metainfer.arch.record import Arch
from metainfer.core.errors import RequestError, UserError
from metainfer.llm.client import EngineClient
from metainfer.llm.dispatch import Dispatcher
from metainfer.plan.plan import Plan
from metainfer.server.metrics import Metrics
from metainfer.server.schema import Conversation
from metainfer.server.settings import ServerSettings
from metainfer.text.chat import ChatEncoder, ChatPrompt
from metainfer.text.generation_config import GenerationConfig
from metainfer.text.tokenizer import Tokenizer

SHUTTING_DOWN = "the server is shutting down"


@dataclass(slots=True)
class Service:
    """One server over one engine.

    Attributes:
        model_names: the names clients may ask for; the first is the one that answers carry.
        max_model_len: longest prompt and output together, in tokens.
        defaults: sampling for the fields that a request leaves open.
        chat: or the reason why this model cannot chat.
        ready: requests are taken; false while a server warms up or drains.
        started_at: seconds since 1970.
        dispatcher: there while the server runs.
    """

    client: EngineClient
    tokenizer: Tokenizer
    arch: Arch
    model_names: tuple[str, ...]
    max_model_len: int
    settings: ServerSettings
    defaults: GenerationConfig
    chat: ChatEncoder | UserError
    metrics: Metrics
    plan: Plan | None = None
    ready: bool = True
    started_at: int = field(default_factory=lambda: int(time.time()))
    _dispatcher: Dispatcher | None = field(default=None)

    @property
    def dispatcher(self) -> Dispatcher:
        if self._dispatcher is None:
            raise RequestError("the server is not running", code="not_ready", status=503)
        return self._dispatcher

    async def start(self) -> None:
        """Listen to the engine from within this event loop."""
        loop = asyncio.get_running_loop()
        self._dispatcher = Dispatcher(self.client, loop.call_soon_threadsafe)

    async def stop(self) -> None:
        """End what still runs and stop listening."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.fail_all(SHUTTING_DOWN)
            await asyncio.to_thread(dispatcher.close)

    def check_model(self, name: str | None) -> None:
        """Raises RequestError (404) for a model that is not served here."""
        if name is not None and name not in self.model_names:
            raise RequestError(
                f"The model `{name[:200]}` does not exist",
                param="model",
                code="model_not_found",
                status=404,
                hint=f"This server has {', '.join(self.model_names)}.",
            )

    def encode_chat(self, body: Conversation, offers_tools: bool = True) -> ChatPrompt:
        """The prompt of a conversation. Slow for long ones: call it in a thread.

        Raises RequestError if a message is wrong or this model cannot chat.
        """
        if isinstance(self.chat, UserError):
            raise RequestError(self.chat.message, code="no_chat", hint=self.chat.hint)
        tools = body.tools if offers_tools else []
        return self.chat.encode(
            [message.model_dump(exclude_none=True) for message in body.messages or ()],
            tools=[tool.model_dump(exclude_none=True) for tool in tools],
            thinking=body.thinks,
            reasoning_effort=body.reasoning_effort,
        )
