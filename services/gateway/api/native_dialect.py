"""Answers of `POST /generate`, as SGLang's clients expect them."""

from collections.abc import Sequence

import msgspec

from services.gateway.api.dialect import SSE_DONE, sse
from services.gateway.api.native_types import Generated, MetaInfo, NativeFinish, NativeScore
from services.gateway.errors import ErrorBody
from services.gateway.generation.choice import Delta
from services.gateway.generation.generation import Collected, Generation
from services.gateway.generation.scores import Score
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.generation import FinishReason


class NativeDialect:
    """A stream's events are answers too, each longer than the one before.

    rids      one for each prompt
    is_batch  the answer is a list
    """

    def __init__(self, *, rids: Sequence[str], vocabulary: Vocabulary, is_batch: bool, with_text: bool) -> None:
        self._rids = rids
        self._vocabulary = vocabulary
        self._is_batch = is_batch
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
            id=self._answer_id(generation, choice),
            finish_reason=self._finish(generation, choice, result.finish),
            prompt_tokens=len(generation.prompts[prompt]),
            completion_tokens=core.num_tokens,
            cached_tokens=core.cached_tokens or 0,
        )
        if generation.continuation(choice).sampling.num_logprobs is not None:
            meta = self._with_scores(meta, generation, choice, result)
        index = choice if self._is_batch else msgspec.UNSET
        return Generated(text=result.text, output_ids=core.token_ids[: core.num_tokens], meta_info=meta, index=index)

    def _answer_id(self, generation: Generation, choice: int) -> str:
        rid, num_choices = self._rids[generation.prompt_index(choice)], generation.plan.num_choices
        return rid if num_choices == 1 else f"{rid}_{choice % num_choices}"

    def _finish(self, generation: Generation, choice: int, reason: FinishReason | None) -> NativeFinish | None:
        if reason is None:
            return None
        if reason is FinishReason.LENGTH:
            return NativeFinish(type="length", length=generation.limits[generation.prompt_index(choice)])
        return NativeFinish(type="stop", matched=generation.choices[choice].matched)

    def _with_scores(self, meta: MetaInfo, generation: Generation, choice: int, result: Collected) -> MetaInfo:
        sampling = generation.continuation(choice).sampling
        start = sampling.prompt_logprobs_start
        prompt_scores = [] if start is None else generation.prompt_scores(choice)[start:]
        meta = msgspec.structs.replace(
            meta,
            input_token_logprobs=[self._score(score) for score in prompt_scores],
            output_token_logprobs=[self._score(score) for score in result.scores],
        )
        if not sampling.num_logprobs:
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
