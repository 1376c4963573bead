"""Types of Anthropic's `POST /v1/messages`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

# -- what is asked


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: Annotated[str, Meta(min_length=1)]
    content: str | list[TextBlock] = ""
    is_error: bool | None = None


class UserTurn(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]


class MessagesTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the client's; those that run at Anthropic have another `type` and are refused."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    description: str | None = None


class MessagesToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`name` for the type "tool" alone."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[UserTurn | AssistantTurn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None


class MessagesFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = msgspec.field(name="schema")


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: MessagesFormat | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    output_config: OutputConfig | None = None


# -- what is answered

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Anthropic counts cached tokens apart from input tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnsweredMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessagesUsage
    role: Literal["assistant"] = "assistant"
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    message: AnsweredMessage


class BlockStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: int


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    delta: Stopped
    usage: MessagesUsage


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    pass


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | UnsetType | None = UNSET


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The body of an answer that is not 2xx, and the last event of a stream that failed."""

    error: MessagesError


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | ErrorEvent


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
