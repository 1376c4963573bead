"""What reaches the worker's actor: from the bus, from its own timer, and from the executor's thread."""

from dataclasses import dataclass

from services.worker.runner import ModelLimits
from shared.messages.execution import Claim, Resend, Step, StepResult


@dataclass(frozen=True, slots=True)
class Claimed:
    claim: Claim
    reply_to: str


@dataclass(frozen=True, slots=True)
class HolderAlive:
    """A heartbeat of the scheduler that holds the lease."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message on the steps' subject that cannot be decoded: whatever it was, it is missing now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: a silent holder loses its lease."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The bus is back; until now nobody could be heard."""


@dataclass(frozen=True, slots=True)
class Reset:
    """A new epoch begins: forget all sequences."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The model is loaded; steps can be run."""

    limits: ModelLimits


@dataclass(frozen=True, slots=True)
class StepRefused:
    """The step contradicts what the worker knows; no further step is run before a Reset."""

    epoch: int
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """Nothing can be run any more: the state of the worker is no longer known."""

    error: Exception


Report = Opened | StepResult | StepRefused | Crashed
Event = Claimed | HolderAlive | Step | Resend | Unreadable | Tick | Reconnected | Report
