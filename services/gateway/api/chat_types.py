"""Types of `POST /v1/chat/completions`: they decode, validate, encode and document it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from services.gateway.api.fields import MAX_TOP_LOGPROBS, GenerationFields
from services.gateway.api.usage import Usage

# -- what is asked


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """This server takes text; parts of other types are refused."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class SystemMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class DeveloperMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="developer"):
    """Counts as a system message."""

    content: Content
    name: str | None = None


class UserMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="user"):
    content: Content
    name: str | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    """`content` may be null or absent only beside tool calls."""

    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    name: str | None = None


class ToolMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: Annotated[str, Meta(min_length=1)]
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class AllowedTool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: FunctionName


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    function: FunctionName


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class AllowedToolsChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Some of `tools`: the others do not exist for this answer."""

    allowed_tools: AllowedTools


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, description="Absent: the rest of the context.")] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: Annotated[bool, Meta(description="Thinking text goes to reasoning_content.")] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool, Meta(description="Refused when true.")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # Fields of OpenAI's that a text model on this server cannot honour: refused by name.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: list[str] | None = None
    prediction: Any = None
    web_search_options: Any = None


# -- what is answered


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class AnsweredFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str


class AnsweredCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


class AnsweredMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


FinishName = Literal["stop", "length", "tool_calls"]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AnsweredMessage
    finish_reason: FinishName
    logprobs: ChoiceLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first one of a call has id, type and name; the others have pieces of the arguments."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    finish_reason: FinishName | None = None
    logprobs: ChoiceLogprobs | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` appears with `stream_options.include_usage` alone: null, and the numbers in a last chunk without choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
