"""To whom the worker belongs, and which step comes next. Pure: time is passed in.

A lease binds the worker to one scheduler for one epoch. Within an epoch steps are numbered from 1: each is run once, a
repeated one is answered with its kept result, and a missing one ends the lease, because deltas have been lost with it.
"""

from collections import deque
from enum import Enum

from shared.messages.execution import Claim, Refused, Step

KEPT_RESULTS = 2
"""As many as steps may be unacknowledged."""


class Verdict(Enum):
    RUN = "run"
    REPEATED = "repeated"
    """Was taken before: send its result again if there is one."""
    LAPSED = "lapsed"
    """Steps have been lost: the lease is over."""
    FOREIGN = "foreign"
    """Of another lease. It may be that of the worker which took our place while we were not heard: nothing to answer."""


class LeaseKeeper:
    """`holder` is the claim that the current lease was granted to, or None while the worker is free."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self.holder: Claim | None = None
        self.epoch = 0
        self._next_seq = 1
        self._alive_ms = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_RESULTS)

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def claim(self, claim: Claim, now_ms: int, unix_ms: int) -> Refused | None:
        """Grant a lease of a new epoch (None), or refuse it while another scheduler holds one.

        The same scheduler may claim again: it has lost what it knew, or the answer to its claim. Epochs come from the wall
        clock, so they grow across restarts of the worker too.
        """
        holder = self.holder
        if holder is not None and not self.has_lapsed(now_ms) and holder.scheduler_instance != claim.scheduler_instance:
            return Refused(reason=f"leased to {holder.scheduler_instance!r}")
        self.holder = claim
        self.epoch = max(self.epoch + 1, unix_ms)
        self._next_seq = 1
        self._alive_ms = now_ms
        self._kept.clear()
        return None

    def keep_alive(self, now_ms: int) -> None:
        """The holder was heard of."""
        self._alive_ms = max(self._alive_ms, now_ms)

    def end(self) -> None:
        self.holder = None
        self._kept.clear()

    def has_lapsed(self, now_ms: int) -> bool:
        """Whether the holder has been silent for too long."""
        return self.holder is not None and now_ms - self._alive_ms > self.ttl_ms

    def take(self, step: Step) -> tuple[Verdict, str]:
        """Whether to run this step, and why not."""
        if self.holder is None:
            return Verdict.FOREIGN, "there is no lease"
        if step.epoch != self.epoch:
            return Verdict.FOREIGN, f"the lease has epoch {self.epoch}"
        if step.seq > self._next_seq:
            return Verdict.LAPSED, f"step {self._next_seq} is missing"
        if step.seq < self._next_seq:
            return Verdict.REPEATED, ""
        self._next_seq += 1
        return Verdict.RUN, ""

    def keep(self, epoch: int, seq: int, result: bytes) -> bool:
        """Remember a result for sending it again; False when its epoch is over."""
        if self.holder is None or epoch != self.epoch:
            return False
        self._kept.append((seq, result))
        return True

    def kept_from(self, seq: int) -> list[bytes]:
        """The kept results of step `seq` and later ones, in order."""
        return [result for kept, result in self._kept if kept >= seq]

    def can_resend(self, seq: int) -> bool:
        """Whether all results from step `seq` on are still kept, or yet to come."""
        return not self._kept or seq >= self._kept[0][0]
