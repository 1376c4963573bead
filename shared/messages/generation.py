"""gateway -> router -> scheduler -> gateway: one generation from submission to its last token."""

from enum import StrEnum

import msgspec

from shared.messages.sampling import Logprobs, SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    """An end token or stop token id was sampled, or the gateway saw a stop string complete."""
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Continue `prompt`; answered at once by Accepted or Rejected, then by Frames up to exactly one finish.

    A gateway that lost its scheduler submits again with the tokens it has in `resumed`; generation goes on behind them and
    positions in Frames count on from `len(resumed)`.
    """

    request_id: str
    gateway_id: str
    prompt: bytes
    """Token ids, int32, never empty."""
    max_new_tokens: int
    """0 computes the prompt and generates nothing; counts `resumed`."""
    sampling: SamplingParams = SamplingParams()
    namespace: str = ""
    """Root of the cache: requests of different namespaces never share a prefix."""
    priority: int = 0
    """Higher goes first."""
    grammar: str | None = None
    """A vetted llguidance grammar that constrains the generated tokens."""
    resumed: bytes = b""
    deadline_ms: int | None = None
    """Unix time after which the work is dropped with a typed answer."""
    trace: dict[str, str] = {}
    """W3C trace context."""
    num_worker_deaths: int = 0
    """At how many deaths of a worker the request was under way, elsewhere and before."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """The client is gone or no longer wants the answer. Idempotent; may trail the request's finish."""

    request_id: str
    reason: str = "client"


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """The gateway saw a stop string complete: end the request as stopped after `num_tokens` generated tokens."""

    request_id: str
    num_tokens: int


class Resync(msgspec.Struct, frozen=True, kw_only=True, tag="resync"):
    """The gateway misses tokens: send everything from generated-token `position` on again."""

    request_id: str
    gateway_id: str
    position: int


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Take no new work; what runs is finished."""


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush_cache"):
    """Drop every cached prefix on which no request stands; answered by CacheFlushed."""


ReplicaInbox = Submit | Abort | Finish | Resync | Drain | FlushCache
unpack_replica_inbox = msgspec.msgpack.Decoder(ReplicaInbox).decode


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    replica_id: str
    epoch: int


class RejectCode(StrEnum):
    TOO_LONG = "too_long"
    """Can never fit: the message states both numbers."""
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    NO_REPLICA = "no_replica"
    DEADLINE = "deadline"
    INVALID = "invalid"


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    code: RejectCode
    message: str
    retry_after_s: float | None = None
    """None: sending the same request again will not help."""


class CacheFlushed(msgspec.Struct, frozen=True, kw_only=True, tag="cache_flushed"):
    num_freed_tokens: int
    num_kept_tokens: int


SubmitReply = Accepted | Rejected
unpack_submit_reply = msgspec.msgpack.Decoder(SubmitReply).decode
unpack_cache_flushed = msgspec.msgpack.Decoder(CacheFlushed).decode


UNKNOWN_REQUEST = "the request is unknown here, or ended too long ago"
"""`Emission.error` in the answer to a Resync for a request that the scheduler does not have: submit it again."""


class Emission(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """New tokens of one request.

    `position` counts generated tokens from 0: a gateway drops what it has and asks for a Resync at a gap. An end token is
    part of `token_ids` and of usage, never of the text.
    """

    request_id: str
    position: int
    token_ids: bytes
    finish: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the cache when the request was first admitted; always below the prompt's length."""
    stop_token: int | None = None
    """The end token or stop id that ended the request; then the last of `token_ids`."""
    error: str | None = None
    """Why, when `finish` is ERROR, and nothing else."""
    logprobs: Logprobs | None = None
    """Of `token_ids`, when asked for."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt from `prompt_logprobs_start` on, once; position 0 has no predecessor and is left out."""
    num_worker_deaths: int = 0
    """Of a request handed back: to be submitted with it again."""


class Frame(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="frame"):
    """Everything one step produced for one gateway."""

    replica_id: str
    epoch: int
    seq: int
    emissions: tuple[Emission, ...]


unpack_frame = msgspec.msgpack.Decoder(Frame).decode
