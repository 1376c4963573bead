"""`POST /v1/messages`: Anthropic's API, for the tools that speak it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.dialect import Asked, Circumstances, encode_json
from services.gateway.api.fields import SamplingFields, check_model, checked_stops, sampling_params
from services.gateway.api.messages_types import (
    AnswerBlock,
    AnsweredMessage,
    AssistantTurn,
    BlockDelta,
    BlockStart,
    BlockStop,
    CountTokensRequest,
    ErrorEvent,
    Event,
    InputDelta,
    MessageDelta,
    MessagesError,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessagesUsage,
    Stopped,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from services.gateway.errors import ErrorBody, invalid
from services.gateway.generation.choice import Delta
from services.gateway.generation.generation import Collected, Generation
from services.gateway.generation.plan import Continuation, Output, Plan
from services.gateway.generation.splitting import CallPiece
from services.gateway.text.tool_calls import CallStart
from shared.messages.constraints import Constraint, JsonSchema, ToolCalls
from shared.messages.generation import FinishReason
from shared.messages.tokenization import EncodeChat

_ERROR_TYPES = {
    "server_error": "api_error",
    "service_unavailable": "overloaded_error",
    "timeout_error": "timeout_error",
    "aborted": "api_error",
    "model_not_found": "not_found_error",
    "request_too_large": "request_too_large",
}
"""Our codes and types of errors to Anthropic's types, where they differ."""


def interpret_messages(request: MessagesRequest, circumstances: Circumstances) -> Asked:
    """Validate what types cannot express, and plan the generation. Raises ApiError."""
    facts, config = circumstances.facts, circumstances.config
    prompt = messages_prompt(request)
    check_model(request.model, facts)
    constraint_param, constraint = _constraint_of(request, prompt.tools) or (None, None)
    sampling = SamplingFields(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p)
    plan = Plan(
        prompt=prompt,
        continuations=(
            Continuation(
                sampling=sampling_params(sampling, circumstances, seed=None),
                max_new_tokens=request.max_tokens,
                stops=checked_stops(request.stop_sequences, "stop_sequences"),
                output=Output(
                    tool_parser=circumstances.tool_parser if prompt.tools else None,
                    reasoning_parser=config.reasoning_parser or None,
                ),
                constraint=constraint,
                constraint_param=constraint_param,
                is_seed_drawn=True,
            ),
        ),
    )

    def make_dialect(rid: str) -> MessagesDialect:
        return MessagesDialect(answer_id=f"msg_{rid}", model=facts.id)

    return Asked(plan=plan, stream=bool(request.stream), make_dialect=make_dialect)


def messages_prompt(request: CountTokensRequest) -> EncodeChat:
    """The conversation as the tokenizer takes it. Raises ApiError."""
    choice = request.tool_choice
    tools = [] if choice is not None and choice.type == "none" else request.tools or []
    names = [tool.name for tool in tools]
    if repeated := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise invalid("tools", f"two tools are named {repeated!r}")
    if choice is not None and choice.type == "tool" and choice.name not in names:
        raise invalid("tool_choice.name", f"no tool is named {choice.name!r}")
    if choice is not None and choice.type == "any" and not tools:
        raise invalid("tool_choice", 'it is "any", but there are no tools')
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system)})
    for turn in request.messages:
        messages += _user_messages(turn) if isinstance(turn, UserTurn) else [_assistant_message(turn)]
    return EncodeChat(
        messages=tuple(messages),
        tools=tuple(
            {
                "type": "function",
                "function": {"name": tool.name, "parameters": tool.input_schema}
                | ({"description": tool.description} if tool.description is not None else {}),
            }
            for tool in tools
        ),
    )


def _user_messages(turn: UserTurn) -> list[dict[str, Any]]:
    """Tool results become messages of their own; what the user says comes behind them."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in turn.content
        if isinstance(block, ToolResultBlock)
    ]
    said = [block for block in turn.content if isinstance(block, TextBlock)]
    return [*results, *([{"role": "user", "content": _text(said)}] if said or not results else [])]


def _assistant_message(turn: AssistantTurn) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _text([block for block in turn.content if isinstance(block, TextBlock)]),
    }
    if thought := "\n".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thought
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _constraint_of(request: MessagesRequest, tools: Sequence[dict[str, Any]]) -> tuple[str, Constraint] | None:
    """The field that constrains the output, and how."""
    calls = _forced_calls(request, tools)
    wanted = request.output_config.format if request.output_config is not None else None
    if wanted is None:
        return None if calls is None else ("tools", calls)
    if calls is not None:
        raise invalid("output_config.format", "it excludes a tool_choice that forces a call")
    return "output_config.format", JsonSchema(schema=wanted.schema_)


def _forced_calls(request: MessagesRequest, tools: Sequence[dict[str, Any]]) -> ToolCalls | None:
    choice = request.tool_choice
    if choice is None or choice.type not in ("any", "tool"):
        return None
    mode = choice.name if choice.type == "tool" and choice.name else "required"
    return ToolCalls(tools=tuple(tools), mode=mode, parallel=not choice.disable_parallel_tool_use)


def messages_error(error: ErrorBody) -> ErrorEvent:
    detail = error.error
    kind = _ERROR_TYPES.get(detail.code or "") or _ERROR_TYPES.get(detail.type, detail.type)
    param = detail.param if detail.param is not None else msgspec.UNSET
    return ErrorEvent(error=MessagesError(message=detail.message, type=kind, param=param))


class MessagesDialect:
    """Events and answers of the Messages API. A message is a list of blocks; in a stream, one block is open at a time."""

    def __init__(self, *, answer_id: str, model: str) -> None:
        self._id = answer_id
        self._model = model
        self._open: AnswerBlock | None = None
        self._num_blocks = 0
        self._has_calls = False

    def opening(self, generation: Generation) -> bytes:
        return _sse(MessageStart(message=self._message([], _usage(generation))))

    def delta(self, generation: Generation, choice: int, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning:
            events += self._opened(ThinkingBlock(thinking=""), ThinkingBlock)
            events += self._continued(ThinkingDelta(thinking=delta.reasoning))
        if delta.text:
            events += self._opened(TextBlock(text=""), TextBlock)
            events += self._continued(TextDelta(text=delta.text))
        for piece in delta.calls:
            events += self._call(piece)
        return events

    def closing(self, generation: Generation) -> bytes:
        stopped = self._stopped(generation, self._has_calls)
        end = MessageDelta(delta=stopped, usage=_usage(generation))
        return self._closed() + _sse(end) + _sse(MessageStop())

    def failure(self, error: ErrorBody) -> bytes:
        return _sse(messages_error(error))

    def whole(self, generation: Generation, collected: Sequence[Collected]) -> AnsweredMessage:
        result = collected[0]
        blocks: list[AnswerBlock] = []
        if result.reasoning:
            blocks.append(ThinkingBlock(thinking=result.reasoning))
        if result.text:
            blocks.append(TextBlock(text=result.text))
        # A call that the limit has cut has no object to show.
        blocks += [
            ToolUseBlock(id=call.id, name=call.name, input=arguments)
            for call in result.calls
            if (arguments := _object(call.arguments)) is not None
        ]
        stopped = self._stopped(generation, bool(result.calls))
        message = self._message(blocks, _usage(generation))
        return msgspec.structs.replace(message, stop_reason=stopped.stop_reason, stop_sequence=stopped.stop_sequence)

    def _call(self, piece: CallPiece) -> bytes:
        if isinstance(piece, CallStart):
            self._has_calls = True
            return self._opened(ToolUseBlock(id=piece.id, name=piece.name, input={}), None)
        return self._continued(InputDelta(partial_json=piece.text))

    def _opened(self, block: AnswerBlock, kind: type[AnswerBlock] | None) -> bytes:
        """Make `block` the open one, unless one of its kind is."""
        if kind is not None and isinstance(self._open, kind):
            return b""
        closed = self._closed()
        self._open = block
        return closed + _sse(BlockStart(index=self._num_blocks, content_block=block))

    def _continued(self, delta: TextDelta | ThinkingDelta | InputDelta) -> bytes:
        return _sse(BlockDelta(index=self._num_blocks, delta=delta))

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._num_blocks += 1
        return _sse(BlockStop(index=self._num_blocks - 1))

    def _message(self, content: list[AnswerBlock], usage: MessagesUsage) -> AnsweredMessage:
        return AnsweredMessage(id=self._id, model=self._model, content=content, usage=usage)

    @staticmethod
    def _stopped(generation: Generation, has_calls: bool) -> Stopped:
        choice = generation.choices[0]
        reason: StopReason = "end_turn"
        if choice.finish is FinishReason.LENGTH:
            reason = "max_tokens"
        elif has_calls:
            reason = "tool_use"
        elif isinstance(choice.matched, str):
            return Stopped(stop_reason="stop_sequence", stop_sequence=choice.matched)
        return Stopped(stop_reason=reason)


def _usage(generation: Generation) -> MessagesUsage:
    usage = generation.usage()
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.cached_tokens,
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def _sse(event: Event) -> bytes:
    """Anthropic names its events twice: in the event line and as `type`."""
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: " + name.encode() + b"\ndata: " + encode_json(event) + b"\n\n"
