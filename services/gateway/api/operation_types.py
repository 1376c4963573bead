"""Types of the endpoints that do not generate."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.api.chat_types import Message, Tool
from services.gateway.api.fields import Rid
from services.gateway.model_facts import SamplingDefaults


class Status(msgspec.Struct, frozen=True, kw_only=True):
    status: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    max_model_len: int
    root: str
    owned_by: str = "radixmesh"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """As SGLang's clients expect it, and a little more."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    model_type: str
    context_length: int
    vocab_size: int
    is_generation: bool
    preferred_sampling_params: SamplingDefaults
    """What a request gets that does not say otherwise."""
    architectures: list[str] = []
    dtype: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: Annotated[str | list[str], Meta(description="One text or several.")] | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Lists of them when a list of texts was given."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    rid: Rid


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    rid: str
    aborted: bool = True


class Flushed(msgspec.Struct, frozen=True, kw_only=True):
    num_freed_tokens: int
    num_kept_tokens: int
    """Requests stand on these; they are cached still."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    load: dict[str, Any]
    heard_s_ago: float


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    python: str
    packages: dict[str, str]
    ready: bool
    num_active_requests: int
    config: dict[str, Any]
    replicas: list[ReplicaInfo]
    members: list[dict[str, Any]]
