"""Settings of the tokenizer."""

from typing import Annotated

from msgspec import Meta

from shared.config import ServiceConfig


class TokenizerConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much work the tokenizer takes on, and how it is grouped."""

    num_threads: Annotated[
        int, Meta(ge=1, le=64, description="Batches encoded at the same time; a long text holds up one of them.")
    ] = 2
    max_waiting: Annotated[
        int, Meta(ge=1, description="Requests waiting to be encoded; one beyond is refused at once.")
    ] = 2048
    max_batch_bytes: Annotated[
        int, Meta(ge=1, description="Requests that wait together are encoded together up to this size, or alone.")
    ] = 262_144
