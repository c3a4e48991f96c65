"""Messages to prompt tokens, in DeepSeek-V4's encoding, with the model's own tokenizer.

The encoding itself is the vendor's library, `deepseek-recipe`, imported only when a chat encoder
is made. Special tokens are found by their spelling; spellings inside messages stay plain text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metainfer.core.errors import RequestError, UserError
from metainfer.text.parse import DSML, THINK_CLOSE, THINK_OPEN, OutputParser
from metainfer.text.tokenizer import Tokenizer

_SPELLINGS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    THINK_OPEN,
    THINK_CLOSE,
    DSML,
)
_RECIPE_MODEL = "DeepSeek-V4-Pro"  # how the library names the V4 encoding, for all V4 models
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it, and what its answer will look like."""

    token_ids: tuple[int, ...]
    thinking: bool
    tools: bool

    def parser(self) -> OutputParser:
        """A new parser for one answer to this prompt."""
        return OutputParser(thinking=self.thinking, tools=self.tools)


class ChatEncoder:
    """Encodes conversations for one model.

    Args:
        thinking: whether the model thinks when a conversation does not say
            (`GenerationConfig.thinking`).

    Raises UserError when the library is not installed or does not read the tokenizer, or when that
    lacks a special token of the encoding.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        try:
            import deepseek_recipe
        except ImportError as error:
            raise UserError(
                "the chat format of DeepSeek-V4 needs the package deepseek-recipe",
                hint="pip install 'metainfer[server]'",
            ) from error
        missing = [s for s in _SPELLINGS if tokenizer.token_id(s) is None]
        if missing:
            raise UserError(
                f"{tokenizer.file} lacks tokens of the chat format: {' '.join(missing)}",
                hint="the model can complete text, but it cannot chat",
            )
        try:
            reader = deepseek_recipe.Tokenizer.from_str(tokenizer.to_json())
        except RuntimeError as error:  # it has a reader of its own, which may be of another age
            raise UserError(
                f"deepseek-recipe does not read {tokenizer.file}: {error}",
                hint="the model can complete text, but it cannot chat",
            ) from error
        self._recipe = deepseek_recipe
        self._thinking = thinking
        self._options = deepseek_recipe.ConversionOptions()
        self._encoding = deepseek_recipe.DeepseekV4Encoding().with_tokenizer(reader)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
    ) -> ChatPrompt:
        """The prompt that asks the model for the next turn. Other threads run meanwhile.

        Args:
            messages: as in OpenAI's chat API, text only; thinking of earlier turns may be under
                `reasoning` or `reasoning_content`.
            tools: OpenAI function tools.
            thinking: None means what `reasoning_effort` implies, else the model's default.
            reasoning_effort: how hard to think; "none" is the same as not thinking.

        Raises RequestError with a sentence about the message or tool at fault.
        """
        if reasoning_effort is not None and reasoning_effort not in _EFFORTS:
            raise RequestError(
                f"reasoning_effort must be one of {', '.join(_EFFORTS)}",
                param="reasoning_effort",
                code="invalid_value",
            )
        if thinking is None:
            thinking = self._thinking if reasoning_effort is None else reasoning_effort != "none"
        body: dict[str, Any] = {
            "model": _RECIPE_MODEL,
            "messages": [_as_recipe_message(message) for message in messages],
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        if tools:
            body["tools"] = list(tools)
        if thinking and reasoning_effort not in (None, "none"):
            body["reasoning_effort"] = reasoning_effort
        try:
            request = self._recipe.ChatCompletionRequest(body).convert(self._options)
            token_ids = tuple(self._encoding.encode(request.conversation))
        except self._recipe.ConversionError as error:
            raise _refusal(_sentence(error.body)) from error
        except UnicodeEncodeError as error:
            sentence = "a message is not valid Unicode (a lone surrogate)"
            raise _refusal(sentence) from error
        except RecursionError as error:
            raise _refusal("a message or tool is nested too deeply") from error
        except (ValueError, TypeError) as error:
            raise _refusal(f"messages: {error}") from error
        return ChatPrompt(token_ids, thinking, bool(tools))


def _as_recipe_message(message: Message) -> dict[str, Any]:
    """OpenAI's newer names to the ones that the library reads."""
    renamed = {key: value for key, value in message.items() if value is not None}
    if renamed.get("role") == "developer":
        renamed["role"] = "system"
    if "reasoning" in renamed:
        renamed.setdefault("reasoning_content", renamed.pop("reasoning"))
    renamed.pop("reasoning", None)
    renamed.setdefault("content", "")
    return renamed


def _refusal(sentence: str) -> RequestError:
    return RequestError(sentence.rstrip("."), param="messages", code="invalid_value")


def _sentence(body: str) -> str:
    """The message within the library's own error body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body
