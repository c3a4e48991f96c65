"""Generated text to events: thinking, visible text and DSML tool calls (DeepSeek-V4's markup).

The grammar of a turn is `[thinking</think>]text[tool calls]`, the tool calls being

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="k" string="true">raw text</｜DSML｜parameter>
    <｜DSML｜parameter name="n" string="false">{"json": 1}</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A call is passed on when it is complete, so that its arguments are always one JSON object; what is
cut off or malformed comes out as text, and no character is lost. (The vendor's own stream parser
passes on unfinished calls and drops malformed ones, hence this one; a test holds the two equal on
well-formed calls.)
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator, Iterator
from enum import Enum, auto

from metainfer.core.events import ReasoningDelta, TextDelta, ToolCallDelta
from metainfer.text.stop import held_back

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"
CALLS_OPEN = f"<{DSML}tool_calls>"
CALLS_CLOSE = f"</{DSML}tool_calls>"

_BLANK_LINE = "\n\n"  # separates text from the calls
_INVOKE_OPEN = f"<{DSML}invoke"
_INVOKE_CLOSE = f"</{DSML}invoke>"
_INVOKE = re.compile(rf'<{DSML}invoke name="([^"\n]+)">(.*){_INVOKE_CLOSE}', re.DOTALL)
_PARAMETER = re.compile(
    rf'\s*<{DSML}parameter name="([^"\n]*)" string="(true|false)">(.*?)</{DSML}parameter>\s*',
    re.DOTALL,
)

ParsedDelta = TextDelta | ReasoningDelta | ToolCallDelta


class _Part(Enum):
    THINKING = auto()
    TEXT = auto()
    CALLS = auto()


class OutputParser:
    """Splits one generation into events, piece by piece.

    Args:
        thinking: the prompt ended with an open `<think>`.
        tools: tools were offered; without them the markup of calls is ordinary text.

    Attributes:
        num_calls: complete tool calls so far.
    """

    def __init__(self, thinking: bool, tools: bool) -> None:
        self._part = _Part.THINKING if thinking else _Part.TEXT
        self._tools = tools
        self._buffer = ""  # not decided yet
        self._block = ""  # in CALLS: the raw text since the last call, should it turn out as text
        self._skip_space = False  # after calls: white space alone is no text
        self.num_calls = 0

    @property
    def is_thinking(self) -> bool:
        return self._part is _Part.THINKING

    def feed(self, text: str) -> list[ParsedDelta]:
        """The events that are certain once `text` is known."""
        self._buffer += text
        return list(self._drain())

    def finish(self) -> list[ParsedDelta]:
        """The rest, when nothing follows."""
        rest, self._buffer = self._block + self._buffer, ""
        self._block = ""
        if self.num_calls and not rest.strip():
            return []
        return list(self._delta(rest))

    def _drain(self) -> Iterator[ParsedDelta]:
        moved = True
        while moved:
            if self._part is _Part.CALLS:
                moved = yield from self._drain_calls()
            else:
                moved = yield from self._drain_text()

    def _drain_text(self) -> Generator[ParsedDelta, None, bool]:
        """Thinking or text up to the next marker. Returns whether a marker was met."""
        markers = [THINK_CLOSE] if self.is_thinking else []
        if self._tools:  # calls may also end the thinking, as with the vendor's parser
            markers += [_BLANK_LINE + CALLS_OPEN, CALLS_OPEN]
        found = [(at, m) for m in markers if (at := self._buffer.find(m)) >= 0]
        if not found:
            keep = held_back(self._buffer, markers)
            yield from self._delta(self._take(len(self._buffer) - keep))
            return False
        at, marker = min(found)
        yield from self._delta(self._take(at))
        self._take(len(marker))
        if marker == THINK_CLOSE:
            self._part = _Part.TEXT
        else:
            self._part, self._block = _Part.CALLS, marker
        return True

    def _drain_calls(self) -> Generator[ParsedDelta, None, bool]:
        """One call, or the end of the block. Returns whether there may be more to do."""
        self._take_space()
        if self._buffer.startswith(_INVOKE_OPEN):
            end = self._buffer.find(_INVOKE_CLOSE)
            if end < 0:
                return False
            invoke = self._take(end + len(_INVOKE_CLOSE))
            call = read_call(invoke)
            if call is None:
                yield from self._give_up(invoke)
            else:
                name, arguments = call
                yield ToolCallDelta(self.num_calls, f"call_{uuid.uuid4().hex}", name, arguments)
                self.num_calls += 1
                self._block = ""
            return True
        if self._buffer.startswith(CALLS_CLOSE):
            self._take(len(CALLS_CLOSE))
            self._part, self._block, self._skip_space = _Part.TEXT, "", True
            return True
        if any(marker.startswith(self._buffer) for marker in (_INVOKE_OPEN, CALLS_CLOSE)):
            return False
        yield from self._give_up("")
        return True

    def _give_up(self, taken: str) -> Iterator[ParsedDelta]:
        """The block is malformed: what it held since its last call is text after all."""
        text, self._block, self._part = self._block + taken, "", _Part.TEXT
        yield from self._delta(text)

    def _delta(self, text: str) -> Iterator[ParsedDelta]:
        if self._skip_space:
            text = text.lstrip()
        if text:
            self._skip_space = False
            yield ReasoningDelta(text) if self.is_thinking else TextDelta(text)

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _take_space(self) -> None:
        self._block += self._take(len(self._buffer) - len(self._buffer.lstrip()))


def read_call(invoke: str) -> tuple[str, str] | None:
    """Name and arguments (a JSON object, as text) of one complete `<｜DSML｜invoke>` element.

    A parameter that claims to be JSON but is not is taken as a string. None if malformed.
    """
    match = _INVOKE.fullmatch(invoke)
    if match is None:
        return None
    name, body = match.groups()
    members, at = [], 0
    while body[at:].strip():
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            return None
        key, is_string, value = parameter.groups()
        if is_string == "true" or not _is_json(value):
            value = json.dumps(value, ensure_ascii=False)
        members.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
        at = parameter.end()
    return name, "{" + ", ".join(members) + "}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
