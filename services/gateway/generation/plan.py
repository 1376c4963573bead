"""What a client asked for, validated and freed from the API it came through."""

import msgspec

from shared.messages.constraints import Constraint
from shared.messages.sampling import SamplingParams
from shared.messages.tokenization import EncodeChat

_SEEDS = 1 << 64


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """Texts or lists of token ids, one generation each (times n); `param` names their field in error messages."""

    items: tuple[str | tuple[int, ...], ...]
    param: str
    add_special_tokens: bool = True


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """How generated text is taken apart."""

    tool_parser: str | None = None
    """Format of tool calls in the text; None: everything is content."""
    reasoning_parser: str | None = None
    starts_inside_reasoning: bool = False
    """The prompt ends in the tag that opens thinking."""
    skip_special_tokens: bool = True


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt is continued.

    `max_new_tokens` None means the rest of the context. `sampling.seed` is the seed of the prompt's choice 0.
    """

    sampling: SamplingParams
    max_new_tokens: int | None
    stops: tuple[str, ...] = ()
    output: Output = Output()
    constraint: Constraint | None = None
    constraint_param: str | None = None
    is_seed_drawn: bool = False
    """The client gave no seed."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One client request: `num_prompts * num_choices` generations, of which `num_kept` per prompt are answered."""

    prompt: Prompts | EncodeChat
    continuations: tuple[Continuation, ...]
    """One for all prompts, or one for each."""
    num_choices: int = 1
    num_kept: int = 1
    cache_salt: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    echo: bool = False
    """The answer starts with the prompt."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompt.items) if isinstance(self.prompt, Prompts) else 1

    @property
    def prompt_param(self) -> str:
        """The field that errors about the prompt name."""
        return self.prompt.param if isinstance(self.prompt, Prompts) else "messages"

    def continuation(self, prompt: int) -> Continuation:
        """That of prompt number `prompt`."""
        assert len(self.continuations) in (1, self.num_prompts), (len(self.continuations), self.num_prompts)
        return self.continuations[prompt if len(self.continuations) > 1 else 0]

    def sampling_of(self, prompt: int, choice: int) -> SamplingParams:
        """Choice i of a prompt draws with seed + i, wrapped into int64: choices differ, and each can be repeated.

        Prompts share a seed that the client gave, so that each is answered as if it came alone; else they differ too.
        """
        continuation = self.continuation(prompt)
        offset = choice + (prompt * self.num_choices if continuation.is_seed_drawn else 0)
        seed = (continuation.sampling.seed + offset + _SEEDS // 2) % _SEEDS - _SEEDS // 2
        return msgspec.structs.replace(continuation.sampling, seed=seed)
