"""Types of `POST /v1/completions`: they decode, validate, encode and document it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from services.gateway.api.fields import MAX_TOP_LOGPROBS, GenerationFields
from services.gateway.api.usage import Usage

Prompt = str | list[str | int | list[int]]


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    prompt: Annotated[Prompt, Meta(description="A text, a list of token ids, or a list of either; never mixed.")]
    max_tokens: Annotated[int, Meta(ge=0, description="0 computes the prompt and generates nothing.")] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, Meta(description="Refused: this server does not fill in the middle.")] = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per token; the first token of an echoed prompt has null, for nothing predicts it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
