"""`POST /v1/completions`."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UnsetType

from services.gateway.api.completion_types import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Prompt,
)
from services.gateway.api.dialect import SSE_DONE, Asked, Circumstances, sse
from services.gateway.api.fields import (
    check_model,
    checked_ids,
    checked_min_tokens,
    checked_stops,
    checked_stream_options,
    constraint_of,
    sampling_params,
)
from services.gateway.api.spelling import spell
from services.gateway.api.usage import Usage, usage_of
from services.gateway.errors import ErrorBody, invalid, unsupported
from services.gateway.generation.choice import Delta
from services.gateway.generation.generation import Collected, Generation
from services.gateway.generation.plan import Continuation, Output, Plan, Prompts
from services.gateway.generation.scores import Score
from services.gateway.model_facts import ModelFacts
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.generation import FinishReason

DEFAULT_MAX_TOKENS = 16


def interpret_completion(request: CompletionRequest, circumstances: Circumstances) -> Asked:
    """Validate what types cannot express, and plan the generation. Raises ApiError."""
    facts = circumstances.facts
    check_model(request.model, facts)
    if request.suffix:
        raise unsupported("suffix", "this server does not fill in the middle")
    include_usage = bool(checked_stream_options(request).include_usage)
    num_kept = request.n or 1
    num_choices = num_kept if request.best_of is None else request.best_of
    if num_choices < num_kept:
        raise invalid("best_of", f"it is {num_choices}, less than n, which is {num_kept}")
    if num_choices > num_kept and request.stream:
        raise invalid("best_of", f"it is {num_choices} with n {num_kept}; the best cannot be known in a stream")
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    num_logprobs = request.logprobs
    if num_logprobs is None and num_choices > num_kept:
        num_logprobs = 0  # the best is chosen by them
    wants_prompt_scores = bool(request.echo) and request.logprobs is not None
    constraint_param, constraint = constraint_of(request, request.response_format) or (None, None)
    plan = Plan(
        prompt=Prompts(
            items=_checked_prompts(request.prompt, facts),
            param="prompt",
            add_special_tokens=request.add_special_tokens is not False,
        ),
        continuations=(
            Continuation(
                sampling=sampling_params(
                    request,
                    circumstances,
                    seed=request.seed,
                    min_new_tokens=checked_min_tokens(request, max_tokens),
                    num_logprobs=num_logprobs,
                    prompt_logprobs_start=0 if wants_prompt_scores else None,
                ),
                max_new_tokens=max_tokens,
                stops=checked_stops(request.stop),
                output=Output(skip_special_tokens=request.skip_special_tokens is not False),
                constraint=constraint,
                constraint_param=constraint_param,
                is_seed_drawn=request.seed is None,
            ),
        ),
        num_choices=num_choices,
        num_kept=num_kept,
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
        timeout_s=request.timeout,
    )

    def make_dialect(rid: str) -> CompletionDialect:
        return CompletionDialect(
            answer_id=f"cmpl-{rid}",
            created=circumstances.now_s,
            model=facts.id,
            vocabulary=facts.vocabulary,
            include_usage=include_usage,
            echo=bool(request.echo),
            logprobs=request.logprobs,
        )

    return Asked(
        plan=plan,
        stream=bool(request.stream),
        make_dialect=make_dialect,
        rids=() if request.rid is None else (request.rid,),
    )


def _checked_prompts(prompt: Prompt, facts: ModelFacts) -> tuple[str | tuple[int, ...], ...]:
    """The four forms of a prompt as one list."""
    if isinstance(prompt, str):
        return (_checked_text(prompt, "prompt"),)
    if not prompt:
        raise invalid("prompt", "the list is empty, at least 1 text or token id is needed")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise invalid("prompt", "texts, token ids and lists of token ids are mixed, expected one kind")
    if isinstance(prompt[0], int):
        return (checked_ids([item for item in prompt if isinstance(item, int)], facts, "prompt"),)
    checked: list[str | tuple[int, ...]] = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            checked.append(_checked_text(item, f"prompt[{i}]"))
        elif isinstance(item, list):
            if not item:
                raise invalid(f"prompt[{i}]", "the list is empty, at least 1 token id is needed")
            checked.append(checked_ids(item, facts, f"prompt[{i}]"))
    return tuple(checked)


def _checked_text(text: str, param: str) -> str:
    if not text:
        raise invalid(param, "the text is empty, at least 1 character is needed")
    return text


class CompletionDialect:
    """Chunks and answers of the Completions API."""

    def __init__(
        self,
        *,
        answer_id: str,
        created: int,
        model: str,
        vocabulary: Vocabulary,
        include_usage: bool,
        echo: bool,
        logprobs: int | None,
    ) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._vocabulary = vocabulary
        self._include_usage = include_usage
        self._echo = echo
        self._logprobs = logprobs
        self._echoed: set[int] = set()
        """Choices whose prompt has been sent."""

    def opening(self, generation: Generation) -> bytes:
        return b""

    def delta(self, generation: Generation, choice: int, delta: Delta) -> bytes:
        text, scores, start = delta.text, list(delta.scores), 0
        prompt_scores: list[Score] = []
        if self._echo:
            start = len(generation.prompt_text(choice))
            if choice not in self._echoed:
                self._echoed.add(choice)
                text = generation.prompt_text(choice) + text
                prompt_scores = generation.prompt_scores(choice)
        chunks = b""
        if text or prompt_scores or (scores and delta.finish is None):
            logprobs = self._scored(prompt_scores, scores, start)
            chunks, scores = self._chunk(CompletionChoice(index=choice, text=text, logprobs=logprobs)), []
        if delta.finish is not None:
            logprobs = self._scored([], scores, start) if scores else None
            last = CompletionChoice(index=choice, text="", logprobs=logprobs, finish_reason=_finish_name(delta.finish))
            chunks += self._chunk(last)
        return chunks

    def closing(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return SSE_DONE
        return sse(self._answer([], usage=usage_of(generation))) + SSE_DONE

    def failure(self, error: ErrorBody) -> bytes:
        return sse(error)

    def whole(self, generation: Generation, collected: Sequence[Collected]) -> Completion:
        plan = generation.plan
        choices: list[CompletionChoice] = []
        for first in range(0, len(collected), plan.num_choices):
            candidates = range(first, first + plan.num_choices)
            best = sorted(candidates, key=lambda choice: collected[choice].mean_logprob, reverse=True)[: plan.num_kept]
            # Without best_of all are kept, in the order of their seeds.
            kept = best if plan.num_choices > plan.num_kept else list(candidates)
            choices += [self._choice(generation, c, collected[c], len(choices) + i) for i, c in enumerate(kept)]
        return self._answer(choices, usage=usage_of(generation))

    def _choice(self, generation: Generation, choice: int, result: Collected, index: int) -> CompletionChoice:
        assert result.finish is not None
        text, prompt_scores, start = result.text, list[Score](), 0
        if self._echo:
            prompt = generation.prompt_text(choice)
            text, start, prompt_scores = prompt + text, len(prompt), generation.prompt_scores(choice)
        logprobs = self._scored(prompt_scores, result.scores, start)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=_finish_name(result.finish))

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return sse(self._answer([choice], usage=None if self._include_usage else msgspec.UNSET))

    def _answer(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _scored(self, prompt: Sequence[Score], generated: Sequence[Score], start: int) -> CompletionLogprobs | None:
        """`start` is where generated text begins in the text of the choice."""
        if self._logprobs is None:
            return None
        scores = [*prompt, *generated]
        return CompletionLogprobs(
            tokens=[self._spell(score.token_id) for score in scores],
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=[self._top(score) for score in scores],
            text_offset=[*(score.offset for score in prompt), *(start + score.offset for score in generated)],
        )

    def _top(self, score: Score) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one."""
        if score.logprob is None:
            return None
        top = {self._spell(candidate.token_id): candidate.logprob for candidate in score.top}
        top.setdefault(self._spell(score.token_id), score.logprob)
        return top

    def _spell(self, token_id: int) -> str:
        return spell(token_id, self._vocabulary, bytes_prefix="bytes:")[0]


def _finish_name(reason: FinishReason) -> Literal["stop", "length"]:
    return "length" if reason is FinishReason.LENGTH else "stop"
