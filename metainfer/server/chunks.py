"""A call's events as one answer or as a stream of chunks: what chat and text share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from metainfer.core.events import FinishReason, GenerationEnd, TextEvent
from metainfer.llm.dispatch import Call
from metainfer.server.calls import CallId, usage_record
from metainfer.server.errors import error_frame, failed
from metainfer.server.schema import StreamOptions
from metainfer.server.sse import DONE, quote

_FAILED = (FinishReason.ERROR, FinishReason.ABORT)


async def collect(call: Call) -> list[list[TextEvent]]:
    """The events of each generation, up to its end. Raises RequestError if one fails."""
    events: list[list[TextEvent]] = [[] for _ in call.generations]
    async for item in call.stream():
        assert item is not None, "without a timeout there is always an event"
        index, event = item
        if isinstance(event, GenerationEnd) and event.reason in _FAILED:
            raise failed(event)
        events[index].append(event)
    return events


class Chunks(ABC):
    """Writes the chunks of a streamed answer.

    They are put together from prepared text, since a server writes thousands a second and only
    a few characters differ.

    Args:
        kind: the `object` of each chunk.
        n: choices per prompt.
    """

    def __init__(
        self, kind: str, call_id: CallId, call: Call, n: int, options: StreamOptions | None
    ) -> None:
        self._call = call
        self._n = n
        self._options = options or StreamOptions()
        self._head = (
            f'data: {{"id":{quote(call_id.id)},"object":"{kind}",'
            f'"created":{call_id.created},"model":{quote(call_id.model)},"choices":['
        )
        self._begun: set[int] = set()

    @abstractmethod
    def begin(self, index: int) -> Iterator[bytes]:
        """Chunks before the first event of a choice."""

    @abstractmethod
    def piece(self, index: int, event: TextEvent) -> Iterator[bytes]:
        """Chunks of one event, made with `chunk`."""

    def write(self, index: int, event: TextEvent) -> Iterator[bytes]:
        """The chunks of one event; after the last one usage, if wanted, and [DONE]."""
        is_end = isinstance(event, GenerationEnd)
        if isinstance(event, GenerationEnd) and event.reason in _FAILED:
            self._call.close()
            yield error_frame(failed(event))
            yield DONE
            return
        if index not in self._begun:
            self._begun.add(index)
            yield from self.begin(index)
        yield from self.piece(index, event)
        if is_end and all(g.end is not None for g in self._call.generations):
            if self._options.include_usage:
                yield f'{self._head}],"usage":{self._usage_now()}}}\n\n'.encode()
            yield DONE

    def chunk(self, index: int, content: str, end: GenerationEnd | None = None) -> bytes:
        """One chunk. `content` is the members of the choice that differ, as JSON."""
        finish = "null"
        if end is not None:
            finish = f'"{end.reason.value}","stop_reason":{quote(end.stop_reason)}'
        usage = ""
        if self._options.continuous_usage_stats:
            usage = f',"usage":{self._usage_now()}'
        elif self._options.include_usage:
            usage = ',"usage":null'
        choice = f'{{"index":{index},{content},"finish_reason":{finish}}}'
        return f"{self._head}{choice}]{usage}}}\n\n".encode()

    def _usage_now(self) -> str:
        return quote(usage_record(self._call, self._n))
