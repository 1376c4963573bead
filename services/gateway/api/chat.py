"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.chat_types import (
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    AssistantMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
    ChoiceLogprobs,
    Content,
    FinishName,
    FunctionDelta,
    Message,
    NamedToolChoice,
    TokenLogprob,
    Tool,
    ToolMessage,
    TopLogprob,
)
from services.gateway.api.dialect import SSE_DONE, Asked, Circumstances, sse
from services.gateway.api.fields import (
    check_model,
    checked_min_tokens,
    checked_stops,
    checked_stream_options,
    constraint_of,
    sampling_params,
)
from services.gateway.api.spelling import spell
from services.gateway.api.usage import usage_of
from services.gateway.errors import ErrorBody, invalid, unsupported
from services.gateway.generation.choice import Delta
from services.gateway.generation.generation import Collected, Generation
from services.gateway.generation.plan import Output, Plan
from services.gateway.generation.scores import Score
from services.gateway.generation.splitting import CallPiece
from services.gateway.text.tool_calls import CallStart
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.constraints import ToolCalls
from shared.messages.generation import FinishReason
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
        sampling=sampling_params(
            request,
            circumstances,
            seed=request.seed,
            min_new_tokens=checked_min_tokens(request, max_tokens),
            num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        ),
        max_new_tokens=max_tokens,
        num_choices=num_choices,
        num_kept=num_choices,
        stops=checked_stops(request.stop),
        output=Output(
            tool_parser=circumstances.tool_parser if tools else None,
            reasoning_parser=config.reasoning_parser if separate else None,
            skip_special_tokens=request.skip_special_tokens is not False,
        ),
        constraint=constraint,
        constraint_param=constraint_param,
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

    return Asked(plan=plan, stream=bool(request.stream), make_dialect=make_dialect, rid=request.rid)


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
    """The tools that the model is told of: none under tool_choice "none"."""
    tools, choice = request.tools or [], request.tool_choice
    names = [tool.function.name for tool in tools]
    if repeated := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise invalid("tools", f"two functions are named {repeated!r}")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise invalid("tool_choice", f"no function of tools is named {choice.function.name!r}")
    if choice == "required" and not tools:
        raise invalid("tool_choice", 'it is "required", but there are no tools')
    return [] if choice == "none" else tools


def _forced_calls(request: ChatRequest, tools: Sequence[Tool]) -> ToolCalls | None:
    """The constraint under which calls are written; None where the model is free to write what it likes."""
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        mode = choice.function.name
    elif choice == "required":
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


class ChatDialect:
    """Chunks and answers of the Chat Completions API."""

    def __init__(
        self,
        *,
        answer_id: str,
        created: int,
        model: str,
        vocabulary: Vocabulary,
        include_usage: bool,
        is_call_named: bool,
    ) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._vocabulary = vocabulary
        self._include_usage = include_usage
        self._is_call_named = is_call_named
        self._with_calls: set[int] = set()
        """Choices that have called a tool."""

    def opening(self, generation: Generation) -> bytes:
        role = ChatDelta(role="assistant", content="")
        return b"".join(
            self._chunk(ChatChunkChoice(index=index, delta=role)) for index in range(len(generation.choices))
        )

    def delta(self, generation: Generation, choice: int, delta: Delta) -> bytes:
        chunks = b""
        logprobs = self._logprobs(delta.scores) if delta.scores else None
        if delta.calls:
            self._with_calls.add(choice)
        if delta.text or delta.reasoning or delta.calls or (delta.scores and delta.finish is None):
            said = ChatDelta(
                content=delta.text or None,
                reasoning_content=delta.reasoning or None,
                tool_calls=[_call_delta(piece) for piece in delta.calls] or None,
            )
            chunks, logprobs = self._chunk(ChatChunkChoice(index=choice, delta=said, logprobs=logprobs)), None
        if delta.finish is not None:
            reason = self._finish_name(delta.finish, choice in self._with_calls)
            chunks += self._chunk(
                ChatChunkChoice(index=choice, delta=ChatDelta(), finish_reason=reason, logprobs=logprobs)
            )
        return chunks

    def closing(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return SSE_DONE
        usage = usage_of(generation)
        last = ChatChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=usage)
        return sse(last) + SSE_DONE

    def failure(self, error: ErrorBody) -> bytes:
        return sse(error)

    def whole(self, generation: Generation, collected: Sequence[Collected]) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(generation, index, result) for index, result in enumerate(collected)],
            usage=usage_of(generation),
        )

    def _choice(self, generation: Generation, index: int, result: Collected) -> ChatChoice:
        assert result.finish is not None
        calls = [
            AnsweredCall(id=call.id, function=AnsweredFunction(name=call.name, arguments=call.arguments))
            for call in result.calls
        ]
        wants_logprobs = generation.plan.sampling.num_logprobs is not None
        return ChatChoice(
            index=index,
            message=AnsweredMessage(
                content=result.text or (None if calls else ""),
                reasoning_content=result.reasoning or msgspec.UNSET,
                tool_calls=calls or msgspec.UNSET,
            ),
            finish_reason=self._finish_name(result.finish, bool(calls)),
            logprobs=self._logprobs(result.scores) if wants_logprobs else None,
        )

    def _finish_name(self, reason: FinishReason, has_calls: bool) -> FinishName:
        if reason is FinishReason.LENGTH:
            return "length"
        # OpenAI's rule: a call that was demanded by name is no decision of the model's.
        return "tool_calls" if has_calls and not self._is_call_named else "stop"

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        usage = None if self._include_usage else msgspec.UNSET
        return sse(ChatChunk(id=self._id, created=self._created, model=self._model, choices=[choice], usage=usage))

    def _logprobs(self, scores: Sequence[Score]) -> ChoiceLogprobs:
        return ChoiceLogprobs(content=[self._token_logprob(score) for score in scores])

    def _token_logprob(self, score: Score) -> TokenLogprob:
        assert score.logprob is not None, "only a prompt's first token has none"
        token, raw = spell(score.token_id, self._vocabulary)
        top = []
        for candidate in score.top:
            text, candidate_raw = spell(candidate.token_id, self._vocabulary)
            top.append(TopLogprob(text, candidate.logprob, list(candidate_raw)))
        return TokenLogprob(token, score.logprob, list(raw), top)


def _call_delta(piece: CallPiece) -> CallDelta:
    if isinstance(piece, CallStart):
        return CallDelta(
            index=piece.index, id=piece.id, type="function", function=FunctionDelta(name=piece.name, arguments="")
        )
    return CallDelta(index=piece.index, function=FunctionDelta(arguments=piece.text))
