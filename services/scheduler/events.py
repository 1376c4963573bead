"""What the scheduler's core takes in and what it decides: events and effects, free of any transport."""

from dataclasses import dataclass

from shared.messages.cluster import KvEvents, Load
from shared.messages.execution import Lease, Resend, Step, StepResult
from shared.messages.generation import (
    Abort,
    CacheFlushed,
    Drain,
    Finish,
    FinishReason,
    FlushCache,
    Frame,
    Resync,
    Submit,
    SubmitReply,
)

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Submitted:
    submit: Submit
    reply_to: str = ""
    """Where Accepted or Rejected goes; empty when nobody asked."""


@dataclass(frozen=True, slots=True)
class FlushRequested:
    message: FlushCache
    reply_to: str


@dataclass(frozen=True, slots=True)
class StepDone:
    result: StepResult


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    lease: Lease


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """is_death: it did not go of its own accord, so a request that was under way may be the cause."""

    reason: str
    is_death: bool = True


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway's heartbeat stopped: nobody reads its requests' tokens any more."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The bus was away and is back: messages of the last moments may be lost, and nothing is late yet."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines and the periodic load report are due."""


Event = (
    Submitted
    | Abort
    | Finish
    | Resync
    | Drain
    | FlushRequested
    | StepDone
    | WorkerJoined
    | WorkerLost
    | GatewayLost
    | Reconnected
    | Tick
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class SendStep:
    step: Step


@dataclass(frozen=True, slots=True)
class SendFrame:
    gateway_id: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class Reply:
    reply_to: str
    message: SubmitReply | CacheFlushed


@dataclass(frozen=True, slots=True)
class PublishKv:
    events: KvEvents


@dataclass(frozen=True, slots=True)
class PublishLoad:
    load: Load


@dataclass(frozen=True, slots=True)
class AskResend:
    """A step's result is overdue or was missed: it may only have been lost on the way."""

    resend: Resend


@dataclass(frozen=True, slots=True)
class ReclaimWorker:
    """The core has given its worker up; the actor must find one again."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecordUsage:
    """One request is over, however it ended: what it used."""

    request_id: str
    finish: FinishReason
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    num_retractions: int
    arrived_ms: int
    admitted_ms: int | None
    """None: it never ran."""
    first_token_ms: int | None
    ended_ms: int
    trace: dict[str, str]
    error: str | None = None


Effect = SendStep | SendFrame | Reply | PublishKv | PublishLoad | AskResend | ReclaimWorker | RecordUsage
