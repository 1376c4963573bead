"""Types of `POST /generate`, SGLang's native call."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from services.gateway.api.fields import (
    MAX_TOP_LOGPROBS,
    CacheSalt,
    NumChoices,
    OutputFields,
    Priority,
    Rid,
    Seed,
    Timeout,
)

LogprobStart = Annotated[int, Meta(ge=-1, description="First prompt token with a logprob; -1: only generated ones.")]
NumTopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class NativeSampling(OutputFields, frozen=True, kw_only=True):
    """`sampling_params`."""

    max_new_tokens: Annotated[int, Meta(ge=0, description="0 computes the prompt and generates nothing.")] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: NumChoices | None = None
    sampling_seed: Seed | None = None
    stop_regex: Annotated[Any, Meta(description="Refused.")] = None
    no_stop_trim: Annotated[bool, Meta(description="Refused when true.")] | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `text` or `input_ids`: one prompt, or a list of them.

    With a list of prompts, sampling_params, return_logprob, logprob_start_len, top_logprobs_num and rid may be lists of
    the same length.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: LogprobStart | list[LogprobStart] | None = None
    top_logprobs_num: NumTopLogprobs | list[NumTopLogprobs] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    rid: Rid | list[Rid] | None = None


NativeScore = tuple[float | None, int, str | None]
"""Logprob, token id, and the token's text if it was asked for."""


class NativeFinish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """type: stop or length. matched: the stop string or token id. length: the limit that was reached."""

    type: str
    matched: str | int | None = None
    length: int | None = None


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[NativeScore] | UnsetType = UNSET
    output_token_logprobs: list[NativeScore] | UnsetType = UNSET
    input_top_logprobs: list[list[NativeScore] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[NativeScore] | None] | UnsetType = UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. In a stream everything is cumulative, and `index` says which one of several it is."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
