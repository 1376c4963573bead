"""All choices of one client request: who of them goes on, what each has said so far, and the bill."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from services.gateway.generation.choice import Advance, ChoiceCore, ChoiceSpec, Delta
from services.gateway.generation.plan import Continuation, Plan
from services.gateway.generation.scores import Score, score_prompt
from services.gateway.generation.splitting import thinking_after
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.tool_calls import CallArguments, CallStart
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.generation import Emission, FinishReason
from shared.messages.sampling import Logprobs
from shared.messages.tokenization import EncodeChat

NO_LOGPROBS = Logprobs(num_top=0, chosen=b"")
"""Of a prompt of one token, which has no predecessor."""


@dataclass(slots=True)
class CollectedCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Collected:
    """The deltas of one choice, put together: what an answer that is not streamed shows."""

    text: str = ""
    reasoning: str = ""
    calls: list[CollectedCall] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.scores += delta.scores
        self.finish = delta.finish
        for piece in delta.calls:
            match piece:
                case CallStart(id=call_id, name=name):
                    self.calls.append(CollectedCall(call_id, name))
                case CallArguments(index=index, text=text):
                    self.calls[index].arguments += text

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; best_of ranks by it. A choice without tokens ranks last."""
        logprobs = [score.logprob for score in self.scores if score.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """prompt_tokens counts each prompt once, whatever n is; cached_tokens <= prompt_tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generation:
    """Choices stand prompt by prompt: choice `p * num_choices + i` is the i-th of prompt p.

    prompts  token ids of each prompt
    limits   max_new_tokens of each prompt's choices
    choices  their state
    """

    def __init__(
        self, plan: Plan, prompts: Sequence[Sequence[int]], limits: Sequence[int], vocabulary: Vocabulary
    ) -> None:
        assert len(prompts) == len(limits) == plan.num_prompts, (len(prompts), len(limits), plan.num_prompts)
        self.plan = plan
        self.prompts = prompts
        self.limits = limits
        self._vocabulary = vocabulary
        self.choices = [
            ChoiceCore(self._spec_for(index), vocabulary)
            for index in range(plan.num_prompts)
            for _ in range(plan.num_choices)
        ]
        self.num_unfinished = len(self.choices)

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def prompt_index(self, choice: int) -> int:
        return choice // self.plan.num_choices

    def continuation(self, choice: int) -> Continuation:
        """What was asked for where this choice is concerned."""
        return self.plan.continuation(self.prompt_index(choice))

    def receive(self, choice: int, emission: Emission) -> Advance:
        core = self.choices[choice]
        was_finished = core.finish is not None
        advance = core.receive(emission)
        if core.finish is not None and not was_finished:
            self.num_unfinished -= 1
        return advance

    def usage(self) -> TokenUsage:
        n = self.plan.num_choices
        cached = 0
        for start in range(0, len(self.choices), n):
            # The choices of one prompt hit what the first of them computed; the client's saving is that of the first.
            known = [c.cached_tokens for c in self.choices[start : start + n] if c.cached_tokens is not None]
            cached += min(min(known, default=0), len(self.prompts[start // n]))
        return TokenUsage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=cached,
        )

    def prompt_text(self, choice: int) -> str:
        """The prompt as the client wrote it, or spelled out from its ids."""
        index = self.prompt_index(choice)
        if not isinstance(self.plan.prompt, EncodeChat) and isinstance(item := self.plan.prompt.items[index], str):
            return item
        return self._spell(self.prompts[index])

    def prompt_scores(self, choice: int) -> list[Score]:
        """Scores of the prompt's tokens, with offsets into `prompt_text`; empty unless asked for."""
        logprobs = self.choices[choice].prompt_logprobs
        if logprobs is None and self.continuation(choice).sampling.prompt_logprobs_start is None:
            return []
        prompt = self.prompts[self.prompt_index(choice)]
        scores = score_prompt(prompt, logprobs or NO_LOGPROBS, self._vocabulary)
        # Control tokens that the tokenizer put in front of a text are no part of it.
        num_added = max(0, len(self._spell(prompt)) - len(self.prompt_text(choice)))
        return [score._replace(offset=max(0, score.offset - num_added)) for score in scores]

    def _spell(self, token_ids: Sequence[int]) -> str:
        detokenizer = Detokenizer(self._vocabulary, skip_special_tokens=False)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def _spec_for(self, index: int) -> ChoiceSpec:
        continuation = self.plan.continuation(index)
        output = continuation.output
        if (thinking := thinking_after(self.prompts[index], output, self._vocabulary)) is not None:
            output = msgspec.structs.replace(output, starts_inside_reasoning=thinking.opened)
        return ChoiceSpec(stops=continuation.stops, min_new_tokens=continuation.sampling.min_new_tokens, output=output)
