"""Request bodies: which fields there are, which are refused, and how they become sampling.

Nothing is accepted and then passed over in silence. A field is one of
- honoured: it is declared below;
- known elsewhere but not supported: in a `NOT_SUPPORTED` table with the values that change
  nothing (null never does); any other value gets 400 naming the field;
- harmless: it only helps a provider's bookkeeping and has no effect here (marked so below);
- unknown: 400 naming it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from metainfer.core.errors import RequestError
from metainfer.llm.generation import TextOptions
from metainfer.llm.request import SamplingParams
from metainfer.text.generation_config import GenerationConfig

UNSUPPORTED = "unsupported_parameter"

_NOT_SUPPORTED_ANYWHERE: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "bad_words": ([],),
        "best_of": (1,),
        "cache_salt": (),
        "guided_choice": (),
        "guided_decoding_backend": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "kv_transfer_params": (),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "mm_processor_kwargs": (),
        "prompt_logprobs": (),
        "request_id": (),
        "response_format": ({"type": "text"},),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "structured_outputs": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "vllm_xargs": (),
    }
)

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
RequestBody = TypeVar("RequestBody", bound="Body")


class Body(BaseModel):
    """A JSON object whose fields are all known. Null means: not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})

    @classmethod
    def read(cls: type[RequestBody], record: object) -> RequestBody:
        """Check a parsed JSON value. Raises RequestError naming the first field at fault."""
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            raise _request_error(error) from None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, record: object) -> object:
        if not isinstance(record, dict):
            return record
        given = {}
        for name, value in record.items():
            if name in cls.NOT_SUPPORTED:
                if value is not None and value not in cls.NOT_SUPPORTED[name]:
                    raise PydanticCustomError(UNSUPPORTED, "not supported", {"field": name})
            elif value is not None or name not in cls.model_fields:
                given[name] = value
        return given


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(Body):
    """The fields that chat and text completions share. Names and meanings follow vLLM's."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Count | None = None
    min_tokens: Count = 0
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = []
    stop_token_ids: list[TokenId] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Harmless: no effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            details = {"field": "stream_options"}
            raise PydanticCustomError("needs_stream", "needs stream to be true", details)
        return self

    def text_options(self) -> TextOptions:
        """How the generated tokens become text."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return TextOptions(stop, self.include_stop_str_in_output, self.skip_special_tokens)

    def sampling(
        self,
        defaults: GenerationConfig,
        vocab_size: int,
        max_tokens: int | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """What the engine is asked for; the model's defaults stand in for open fields.

        Raises RequestError naming the field that is out of range.
        """
        allowed = self.allowed_token_ids
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                check_token_id(token_id, vocab_size, name)
        return SamplingParams(
            temperature=_first(self.temperature, defaults.temperature),
            top_p=_first(self.top_p, defaults.top_p),
            top_k=_first(self.top_k, defaults.top_k),
            min_p=_first(self.min_p, defaults.min_p),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=MappingProxyType(_biases(self.logit_bias, vocab_size)),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            allowed_token_ids=None if allowed is None else tuple(allowed),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCallRecord(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class MessageRecord(Body):
    """One message of a conversation. `name` is not part of the model's format: no effect."""

    NOT_SUPPORTED = MappingProxyType(
        {"audio": (), "function_call": (), "refusal": (), "annotations": ([],), "prefix": (False,)}
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCallRecord] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "is missing", {"field": "content"})
        return self


class FunctionRecord(Body):
    NOT_SUPPORTED = MappingProxyType({"strict": (False,)})

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolRecord(Body):
    type: Literal["function"]
    function: FunctionRecord


class ChatTemplateOptions(Body):
    thinking: bool | None = None
    enable_thinking: bool | None = None

    @property
    def thinks(self) -> bool | None:
        return self.enable_thinking if self.thinking is None else self.thinking


class Thinking(Body):
    """How DeepSeek's own API switches thinking."""

    type: Literal["enabled", "disabled"]


class Conversation(Body):
    """What a prompt of the chat format is made of."""

    messages: list[MessageRecord] | None = None
    tools: list[ToolRecord] = []
    reasoning_effort: str | None = None
    chat_template_kwargs: ChatTemplateOptions = ChatTemplateOptions()
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _check_thinking(self) -> Self:
        template = self.chat_template_kwargs.thinks
        if self.thinking is not None and template not in (None, self.thinking.type == "enabled"):
            details = {"field": "thinking"}
            raise PydanticCustomError("differs", "differs from chat_template_kwargs", details)
        return self

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None where the request does not say."""
        if self.thinking is not None:
            return self.thinking.type == "enabled"
        return self.chat_template_kwargs.thinks

    def texts(self) -> Iterator[str]:
        """What is said in the conversation, without thinking, which the format may leave out."""
        for message in self.messages or ():
            if isinstance(message.content, str):
                yield message.content
            else:
                yield from (part.text for part in message.content or ())


class ChatBody(Conversation, SamplingBody):
    """POST /v1/chat/completions."""

    NOT_SUPPORTED = MappingProxyType(
        {
            **_NOT_SUPPORTED_ANYWHERE,
            "add_generation_prompt": (True,),
            "add_special_tokens": (False,),
            "audio": (),
            "chat_template": (),
            "continue_final_message": (False,),
            "documents": ([],),
            "echo": (False,),
            "function_call": ("none",),
            "functions": ([],),
            "include_reasoning": (True,),
            "media_io_kwargs": (),
            "modalities": (["text"],),
            "parallel_tool_calls": (True,),
            "prediction": (),
            "prompt_cache_retention": (),
            "service_tier": ("auto", "default"),
            "store": (False,),
            "verbosity": ("medium",),
            "web_search_options": (),
        }
    )

    messages: list[MessageRecord]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Any = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    NOT_SUPPORTED = MappingProxyType(
        {**_NOT_SUPPORTED_ANYWHERE, "prompt_embeds": (), "suffix": ("",)}
    )

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    add_special_tokens: bool = True


class TokenizeBody(Conversation):
    """POST /tokenize: either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    """Raises RequestError naming the token that the model does not have."""
    if not 0 <= token_id < vocab_size:
        raise RequestError(
            f"{param} has token {token_id}, but the model's tokens are 0 to {vocab_size - 1}",
            param=param,
            code="invalid_value",
        )


def _first(*values: Any) -> Any:
    """The first value that is given."""
    return next((value for value in values if value is not None), None)


def _biases(by_spelling: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """The keys of `logit_bias` are token ids as JSON can spell them."""
    biases = {}
    for spelling, bias in by_spelling.items():
        # No id has more digits, and of thousands Python makes no number at all.
        if not spelling.isascii() or not spelling.isdigit() or len(spelling) > 20:
            raise RequestError(
                f"logit_bias has the key {spelling[:20]!r}, which is not a token id",
                param="logit_bias",
                code="invalid_value",
            )
        token_id = int(spelling)
        check_token_id(token_id, vocab_size, "logit_bias")
        biases[token_id] = bias
    return biases


def _request_error(error: ValidationError) -> RequestError:
    """OpenAI's kind of error for the most specific of pydantic's."""
    details = max(error.errors(include_url=False), key=_precision)
    kind, path = details["type"], _path(details)
    if kind == UNSUPPORTED:
        message, code = f"{path} is not supported", UNSUPPORTED
    elif kind == "extra_forbidden":
        message, code = f"Unrecognized request argument supplied: {path}", "unknown_parameter"
    elif kind == "missing":
        message, code = f"{path} is missing", "missing_required_parameter"
    else:
        where = f"{path}: " if path else "the body: "
        message, code = where + details["msg"], "invalid_value"
    return RequestError(message, param=path or None, code=code)


def _precision(details: ErrorDetails) -> tuple[int, bool]:
    """Of the branches of a union, the one that got furthest: its type was right."""
    return len(details["loc"]), not details["type"].endswith("_type")


def _path(details: ErrorDetails) -> str:
    """`messages[0].content` of pydantic's location, without the names of union branches."""
    path = ""
    for step in (*details["loc"], *filter(None, [details.get("ctx", {}).get("field")])):
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in ("str", "constrained-str") and "[" not in step:
            path += f".{step}" if path else step
    return path
