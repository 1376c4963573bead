"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.chat_dialect import ChatDialect
from services.gateway.api.chat_types import (
    AllowedToolsChoice,
    AssistantMessage,
    ChatRequest,
    Content,
    Message,
    NamedToolChoice,
    Tool,
    ToolMessage,
)
from services.gateway.api.dialect import Asked, Circumstances
from services.gateway.api.fields import (
    check_model,
    checked_min_tokens,
    checked_stops,
    checked_stream_options,
    constraint_of,
    sampling_params,
)
from services.gateway.errors import invalid, unsupported
from services.gateway.generation.plan import Continuation, Output, Plan
from shared.messages.constraints import ToolCalls
from shared.messages.tokenization import EncodeChat

_UNSUPPORTED = {
    "audio": "this server generates text only",
    "function_call": "deprecated by OpenAI, use tool_choice",
    "functions": "deprecated by OpenAI, use tools",
    "prediction": "this server has no predicted outputs",
    "web_search_options": "this server does not search the web",
}


def interpret_chat(request: ChatRequest, circumstances: Circumstances) -> Asked:
    """Validate what types cannot express, and plan the generation. Raises ApiError."""
    facts, config = circumstances.facts, circumstances.config
    check_model(request.model, facts)
    for name, reason in _UNSUPPORTED.items():
        if getattr(request, name) is not None:
            raise unsupported(name, reason)
    if request.continue_final_message:
        raise unsupported("continue_final_message", "chat templates here always end the last message")
    if request.modalities is not None and request.modalities != ["text"]:
        raise unsupported("modalities", 'this server generates text only, ["text"]')
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "given although logprobs is not true")
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    max_tokens = min(limits) if limits else None
    tools = _checked_tools(request)
    constraint_param, constraint = constraint_of(request, request.response_format) or (None, None)
    if (calls := _forced_calls(request, tools)) is not None:
        if constraint_param is not None:
            raise invalid(constraint_param, "it excludes a tool_choice that forces a call, and strict tools")
        constraint_param, constraint = "tools", calls
    include_usage = bool(checked_stream_options(request).include_usage)
    separate = config.reasoning_parser and request.separate_reasoning is not False
    num_choices = request.n or 1
    named = isinstance(request.tool_choice, NamedToolChoice)
    plan = Plan(
        prompt=chat_prompt(
            request.messages, tools, request.add_generation_prompt is not False, _template_args(request)
        ),
        continuations=(
            Continuation(
                sampling=sampling_params(
                    request,
                    circumstances,
                    seed=request.seed,
                    min_new_tokens=checked_min_tokens(request, max_tokens),
                    num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                ),
                max_new_tokens=max_tokens,
                stops=checked_stops(request.stop),
                output=Output(
                    tool_parser=circumstances.tool_parser if tools else None,
                    reasoning_parser=config.reasoning_parser if separate else None,
                    skip_special_tokens=request.skip_special_tokens is not False,
                ),
                constraint=constraint,
                constraint_param=constraint_param,
                is_seed_drawn=request.seed is None,
            ),
        ),
        num_choices=num_choices,
        num_kept=num_choices,
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
        timeout_s=request.timeout,
    )

    def make_dialect(rid: str) -> ChatDialect:
        return ChatDialect(
            answer_id=f"chatcmpl-{rid}",
            created=circumstances.now_s,
            model=facts.id,
            vocabulary=facts.vocabulary,
            include_usage=include_usage,
            is_call_named=named,
        )

    return Asked(
        plan=plan,
        stream=bool(request.stream),
        make_dialect=make_dialect,
        rids=() if request.rid is None else (request.rid,),
    )


def chat_prompt(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    add_generation_prompt: bool,
    template_args: dict[str, Any] | None = None,
) -> EncodeChat:
    """What the tokenizer renders. Raises ApiError for a message without content."""
    return EncodeChat(
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages)),
        tools=tuple(_builtin(tool) for tool in tools),
        add_generation_prompt=add_generation_prompt,
        template_args=template_args or {},
    )


def _checked_tools(request: ChatRequest) -> list[Tool]:
    """The tools that the model is told of: none under tool_choice "none", else all or those that are allowed."""
    tools, choice = request.tools or [], request.tool_choice
    names = [tool.function.name for tool in tools]
    if repeated := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise invalid("tools", f"two functions are named {repeated!r}")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise invalid("tool_choice", f"no function of tools is named {choice.function.name!r}")
    if isinstance(choice, AllowedToolsChoice):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        if unknown := next((name for name in allowed if name not in names), None):
            raise invalid("tool_choice", f"no function of tools is named {unknown!r}")
        return [tool for tool in tools if tool.function.name in allowed]
    if choice == "required" and not tools:
        raise invalid("tool_choice", 'it is "required", but there are no tools')
    return [] if choice == "none" else tools


def _forced_calls(request: ChatRequest, tools: Sequence[Tool]) -> ToolCalls | None:
    """The constraint under which calls are written; None where the model is free to write what it likes."""
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        mode = choice.function.name
    elif choice == "required" or (isinstance(choice, AllowedToolsChoice) and choice.allowed_tools.mode == "required"):
        mode = "required"
    elif any(tool.function.strict for tool in tools):
        mode = "auto"
    else:
        return None
    return ToolCalls(
        tools=tuple(_builtin(tool) for tool in tools),
        mode=mode,
        parallel=request.parallel_tool_calls is not False,
        whitespace=request.json_whitespace or "default",
    )


def _template_args(request: ChatRequest) -> dict[str, Any]:
    arguments = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", request.reasoning_effort)
    return arguments


def _message(message: Message, param: str) -> dict[str, Any]:
    """A message as templates know it: content is one text."""
    if isinstance(message, AssistantMessage) and message.content is None and not message.tool_calls:
        raise invalid(f"{param}.content", "this field is required, except in an assistant message with tool_calls")
    plain: dict[str, Any] = {"role": message.__struct_config__.tag, "content": _text(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            plain["tool_calls"] = [_builtin(call) for call in message.tool_calls]
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
    return plain


def _text(content: Content | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _builtin(value: msgspec.Struct) -> dict[str, Any]:
    """As plain JSON objects, without nulls: a template would print them."""
    return {
        name: _builtin(member) if isinstance(member, msgspec.Struct) else member
        for name, member in msgspec.structs.asdict(value).items()
        if member is not None
    }
