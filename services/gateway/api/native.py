"""`POST /generate`: SGLang's native call. Streams repeat the whole text so far, as its clients expect."""

from collections.abc import Sequence

import msgspec

from services.gateway.api.dialect import SSE_DONE, Asked, Circumstances, sse
from services.gateway.api.fields import checked_ids, checked_stops, constraint_of, sampling_params
from services.gateway.api.native_types import (
    Generated,
    GenerateRequest,
    MetaInfo,
    NativeFinish,
    NativeSampling,
    NativeScore,
)
from services.gateway.errors import ErrorBody, invalid, unsupported
from services.gateway.generation.choice import Delta
from services.gateway.generation.generation import Collected, Generation
from services.gateway.generation.plan import Output, Plan, Prompts
from services.gateway.generation.scores import Score
from services.gateway.model_facts import ModelFacts
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.generation import FinishReason

DEFAULT_MAX_NEW_TOKENS = 128
_PREFIX = "sampling_params."


def interpret_generate(request: GenerateRequest, circumstances: Circumstances) -> Asked:
    """Validate what types cannot express, and plan the generation. Raises ApiError."""
    facts = circumstances.facts
    sampling = request.sampling_params or NativeSampling()
    if sampling.stop_regex is not None:
        raise unsupported(f"{_PREFIX}stop_regex", "use stop, or constrain the output with regex")
    if sampling.no_stop_trim:
        raise unsupported(f"{_PREFIX}no_stop_trim", "a stop string is never part of the text")
    max_tokens = DEFAULT_MAX_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
    min_tokens = sampling.min_new_tokens or 0
    if min_tokens > max_tokens:
        problem = f"it is {min_tokens}, more than max_new_tokens, which is {max_tokens}"
        raise invalid(f"{_PREFIX}min_new_tokens", problem)
    prompts, is_batch = _checked_prompts(request, facts)
    start = -1 if request.logprob_start_len is None else request.logprob_start_len
    num_choices = sampling.n or 1
    constraint_param, constraint = constraint_of(sampling, prefix=_PREFIX) or (None, None)
    plan = Plan(
        prompt=prompts,
        sampling=sampling_params(
            sampling,
            circumstances,
            seed=sampling.sampling_seed,
            min_new_tokens=min_tokens,
            num_logprobs=(request.top_logprobs_num or 0) if request.return_logprob else None,
            prompt_logprobs_start=start if request.return_logprob and start >= 0 else None,
            prefix=_PREFIX,
        ),
        max_new_tokens=max_tokens,
        num_choices=num_choices,
        num_kept=num_choices,
        stops=checked_stops(sampling.stop, f"{_PREFIX}stop"),
        output=Output(skip_special_tokens=sampling.skip_special_tokens is not False),
        constraint=constraint,
        constraint_param=constraint_param,
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
        timeout_s=request.timeout,
    )

    def make_dialect(rid: str) -> NativeDialect:
        return NativeDialect(
            rid=rid,
            vocabulary=facts.vocabulary,
            is_batch=is_batch or num_choices > 1,
            with_top=bool(request.top_logprobs_num),
            with_text=bool(request.return_text_in_logprobs),
        )

    return Asked(plan=plan, stream=bool(request.stream), make_dialect=make_dialect, rid=request.rid)


def _checked_prompts(request: GenerateRequest, facts: ModelFacts) -> tuple[Prompts, bool]:
    """The prompts, and whether the client sent a list of them."""
    if (request.text is None) == (request.input_ids is None):
        raise invalid("text", "exactly one of text and input_ids must be given")
    if request.text is not None:
        texts = [request.text] if isinstance(request.text, str) else request.text
        if not texts or not all(texts):
            raise invalid("text", "it is empty, at least 1 character is needed")
        return Prompts(items=tuple(texts), param="text"), isinstance(request.text, list)
    given = request.input_ids or []
    lists = [item for item in given if isinstance(item, list)]
    if lists and len(lists) < len(given):
        raise invalid("input_ids", "token ids and lists of token ids are mixed, expected one kind")
    is_batch = bool(lists)
    if not is_batch:
        lists = [[item for item in given if isinstance(item, int)]]
    if not all(lists):
        raise invalid("input_ids", "it is empty, at least 1 token id is needed")
    items = tuple(
        checked_ids(ids, facts, f"input_ids[{i}]" if is_batch else "input_ids") for i, ids in enumerate(lists)
    )
    return Prompts(items=items, param="input_ids"), is_batch


class NativeDialect:
    """Answers of SGLang's native API; a stream's events are answers too, each longer than the one before."""

    def __init__(self, *, rid: str, vocabulary: Vocabulary, is_batch: bool, with_top: bool, with_text: bool) -> None:
        self._rid = rid
        self._vocabulary = vocabulary
        self._is_batch = is_batch
        self._with_top = with_top
        self._with_text = with_text
        self._collected: dict[int, Collected] = {}

    def opening(self, generation: Generation) -> bytes:
        return b""

    def delta(self, generation: Generation, choice: int, delta: Delta) -> bytes:
        collected = self._collected.setdefault(choice, Collected())
        collected.add(delta)
        return sse(self._generated(generation, choice, collected))

    def closing(self, generation: Generation) -> bytes:
        return SSE_DONE

    def failure(self, error: ErrorBody) -> bytes:
        return sse(error)

    def whole(self, generation: Generation, collected: Sequence[Collected]) -> Generated | list[Generated]:
        answers = [self._generated(generation, choice, result) for choice, result in enumerate(collected)]
        return answers if self._is_batch else answers[0]

    def _generated(self, generation: Generation, choice: int, result: Collected) -> Generated:
        core = generation.choices[choice]
        prompt = generation.prompt_index(choice)
        meta = MetaInfo(
            id=self._rid if not self._is_batch else f"{self._rid}-{choice}",
            finish_reason=self._finish(generation, choice, result.finish),
            prompt_tokens=len(generation.prompts[prompt]),
            completion_tokens=core.num_tokens,
            cached_tokens=core.cached_tokens or 0,
        )
        if generation.plan.sampling.num_logprobs is not None:
            meta = self._with_scores(meta, generation, choice, result)
        index = choice if self._is_batch else msgspec.UNSET
        return Generated(text=result.text, output_ids=core.token_ids[: core.num_tokens], meta_info=meta, index=index)

    def _finish(self, generation: Generation, choice: int, reason: FinishReason | None) -> NativeFinish | None:
        if reason is None:
            return None
        if reason is FinishReason.LENGTH:
            return NativeFinish(type="length", length=generation.limits[generation.prompt_index(choice)])
        return NativeFinish(type="stop", matched=generation.choices[choice].matched)

    def _with_scores(self, meta: MetaInfo, generation: Generation, choice: int, result: Collected) -> MetaInfo:
        start = generation.plan.sampling.prompt_logprobs_start
        prompt_scores = [] if start is None else generation.prompt_scores(choice)[start:]
        meta = msgspec.structs.replace(
            meta,
            input_token_logprobs=[self._score(score) for score in prompt_scores],
            output_token_logprobs=[self._score(score) for score in result.scores],
        )
        if not self._with_top:
            return meta
        return msgspec.structs.replace(
            meta,
            input_top_logprobs=[self._top(score) for score in prompt_scores],
            output_top_logprobs=[self._top(score) for score in result.scores],
        )

    def _score(self, score: Score) -> NativeScore:
        return (score.logprob, score.token_id, self._text(score.token_id))

    def _top(self, score: Score) -> list[NativeScore] | None:
        """None where nothing predicts the token."""
        if score.logprob is None:
            return None
        return [(logprob, token_id, self._text(token_id)) for token_id, logprob in score.top]

    def _text(self, token_id: int) -> str | None:
        return self._vocabulary.token_text(token_id) if self._with_text else None
