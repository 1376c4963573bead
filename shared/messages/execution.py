"""scheduler <-> worker: steps, their results, and the lease under which steps are taken.

A step names sequences by *handle*, an int32 that the scheduler gives out once per admission and epoch. The worker keeps per
handle: tokens, extents, sampling state, matcher. Steps carry only what changed, so their size does not grow with contexts.
"""

from enum import IntEnum

import msgspec

from shared.messages.sampling import Logprobs, SamplingParams


class NewSequence(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence enters the worker: everything it must know about it, once."""

    handle: int
    token_ids: bytes
    """The prompt, then tokens generated before (a resumed or retracted request)."""
    prompt_len: int
    """How many of `token_ids` are the prompt; the rest are generated tokens: penalties and the matcher replay them."""
    prefix_len: int
    """How many of `token_ids` have their KV in `extents` already."""
    extents: bytes
    """int32 pairs (start, length): the KV slots of this sequence in order of position; room beyond `token_ids` is reserve."""
    max_new_tokens: int
    """Limit on generated tokens, those in `token_ids` included. 0: compute the prompt, sample nothing."""
    sampling: SamplingParams = SamplingParams()
    grammar: str | None = None


class ExtentUpdate(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where a sequence's KV lies from now on: its slots for positions below `start` stay, the rest is replaced."""

    handle: int
    start: int
    """Position from which `extents` hold; equal to the slots held so far when the sequence only grows."""
    extents: bytes
    """int32 pairs (start, length)"""


class Step(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="step"):
    """One mixed batch. The worker applies `release`, `admit` and `update` in this order, then runs the rows.

    Rows are the `decode` handles, then the `extend` pairs; results come in the same order. A decode row computes the
    sequence's last token and samples the next. An extend row computes the next `extend_len` uncomputed tokens and samples
    only if they reach the end of `token_ids` (and `max_new_tokens` is not 0). Rows of sequences that have ended in the
    meantime are dropped by the worker: the scheduler sends step N+1 before it knows the result of N.
    """

    epoch: int
    seq: int
    """Steps of an epoch are numbered from 1 without gaps."""
    decode: bytes = b""
    """int32 [n] handles"""
    extend: bytes = b""
    """int32 [m, 2] (handle, extend_len)"""
    admit: tuple[NewSequence, ...] = ()
    update: tuple[ExtentUpdate, ...] = ()
    release: bytes = b""
    """int32 handles of sequences that are no longer wanted"""


class RowEnd(IntEnum):
    """What became of a row; one byte a row in StepResult.ends."""

    RUNNING = 0
    STOP = 1
    """The last token is an end token or a stop id."""
    LENGTH = 2
    DROPPED = 3
    """The sequence had ended before; nothing was computed."""
    FAILED = 4
    """See StepResult.failures; this request alone is over."""


class StepResult(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="result"):
    """What a step produced, row by row in the step's order."""

    epoch: int
    seq: int
    counts: bytes
    """int32 [rows]: new tokens of each row. More than 1: a grammar has forced tokens, or the worker has guessed them. 0: an
    extend that has not reached the end, or a row whose grammar was not ready in time; such a row has computed its tokens, and
    the next one computes the last again."""
    token_ids: bytes
    """int32 [sum of counts]"""
    ends: bytes
    """uint8 [rows]: RowEnd"""
    failures: tuple[tuple[int, str], ...] = ()
    """(handle, message)"""
    logprobs: dict[int, Logprobs] = {}
    """by handle, for the tokens of this step"""
    prompt_logprobs: dict[int, Logprobs] = {}
    """by handle, for prompt tokens computed in this step and asked for"""
    wait_us: int = 0
    """How long the executor had nothing to run before this step."""
    run_us: int = 0
    """How long it then ran."""
    without_kv: dict[int, int] = {}
    """By handle, of sequences that have ended with forced tokens: how many tokens before the last have no KV."""


class Lapsed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="lapsed"):
    """The worker does not take this step: the lease is over, or a step is missing. Claim again."""

    epoch: int
    seq: int
    reason: str
    is_handover: bool = False
    """The worker is well and gives the lease back of its own accord: no request is to blame for it."""


class Resend(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="resend"):
    """scheduler -> worker: send the results from `seq` on again; the last two are kept."""

    epoch: int
    seq: int


WorkerInbox = Step | Resend
unpack_worker_inbox = msgspec.msgpack.Decoder(WorkerInbox).decode
WorkerOutbox = StepResult | Lapsed
unpack_worker_outbox = msgspec.msgpack.Decoder(WorkerOutbox).decode


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """A scheduler asks a worker group to take its steps."""

    replica_id: str
    """Steps come on `replica.<id>.steps`."""
    scheduler_instance: str


class Lease(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """The worker takes steps of this epoch only; an older lease is over. Its KV pool starts empty."""

    group: str
    epoch: int
    num_slots: int
    """Token slots in the KV pool."""
    context_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    ttl_ms: int = 3000
    """The lease lapses after this long without a step or a heartbeat of the scheduler."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    reason: str


ClaimReply = Lease | Refused
unpack_claim = msgspec.msgpack.Decoder(Claim).decode
unpack_claim_reply = msgspec.msgpack.Decoder(ClaimReply).decode
