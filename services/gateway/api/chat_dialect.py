"""Chunks and answers of the Chat Completions API."""

from collections.abc import Sequence

import msgspec

from services.gateway.api.chat_types import (
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChoiceLogprobs,
    FinishName,
    FunctionDelta,
    TokenLogprob,
    TopLogprob,
)
from services.gateway.api.dialect import SSE_DONE, sse
from services.gateway.api.spelling import spell
from services.gateway.api.usage import usage_of
from services.gateway.errors import ErrorBody
from services.gateway.generation.choice import Delta
from services.gateway.generation.generation import Collected, Generation
from services.gateway.generation.scores import Score
from services.gateway.generation.splitting import CallPiece
from services.gateway.text.tool_calls import CallStart
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.generation import FinishReason


class ChatDialect:
    """One answer in the making; `is_call_named`: the call was demanded by the function's name."""

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
        wants_logprobs = generation.continuation(index).sampling.num_logprobs is not None
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
