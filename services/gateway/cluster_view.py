"""What the gateway knows of the others, from their Load and Heartbeat messages: readiness, gauges, silent replicas.

Pure: time comes with the calls, in seconds of one monotonic clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shared.messages.cluster import Heartbeat, Load, ServiceState

NEEDED_ROLES = ("tokenizer", "router")
"""Without one ready member of each, no request gets as far as a replica."""


@dataclass(slots=True)
class ReplicaView:
    """The last Load of a replica, when it came, and when the replica last made a step or had nothing to do."""

    load: Load
    heard_s: float
    moved_s: float


@dataclass(slots=True)
class MemberView:
    heartbeat: Heartbeat
    heard_s: float


class ClusterView:
    """`silence_s` without a sign of life and a member is gone; `stall_s` without a step and a busy replica is stalled."""

    def __init__(self, silence_s: float, stall_s: float) -> None:
        self._silence_s = silence_s
        self._stall_s = stall_s
        self._replicas: dict[str, ReplicaView] = {}
        self._members: dict[tuple[str, str], MemberView] = {}
        self._listening_since: float | None = 0.0
        """None while the bus is away: then silence says nothing about the others."""

    def take_connection(self, connected: bool, now_s: float) -> None:
        self._listening_since = now_s if connected else None

    def take_gap(self, now_s: float) -> None:
        """This process itself stood still until now: what others said in the meantime is still unread."""
        if self._listening_since is not None:
            self._listening_since = now_s

    def take_load(self, load: Load, now_s: float) -> None:
        known = self._replicas.get(load.replica_id)
        moves = (
            known is None
            or load.num_running_reqs == 0
            or (load.num_steps, load.epoch) != (known.load.num_steps, known.load.epoch)
        )
        moved_s = now_s if known is None or moves else known.moved_s
        self._replicas[load.replica_id] = ReplicaView(load, now_s, moved_s)

    def take_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        self._members[heartbeat.role, heartbeat.instance] = MemberView(heartbeat, now_s)

    def forget_silent(self, now_s: float) -> None:
        """Drop who was silent for long, so that names of the past do not pile up."""
        limit_s = now_s - 10 * self._silence_s
        self._replicas = {name: view for name, view in self._replicas.items() if view.heard_s > limit_s}
        self._members = {name: view for name, view in self._members.items() if view.heard_s > limit_s}

    def replicas(self, now_s: float) -> Iterator[ReplicaView]:
        """Those that were heard lately."""
        return (view for view in self._replicas.values() if now_s - view.heard_s <= self._silence_s)

    def members(self, now_s: float) -> Iterator[Heartbeat]:
        return (view.heartbeat for view in self._members.values() if now_s - view.heard_s <= self._silence_s)

    def silence_of(self, replica_id: str, now_s: float) -> float:
        """Seconds since the replica was last heard, counting only time in which it could have been heard."""
        if self._listening_since is None:
            return 0.0
        view = self._replicas.get(replica_id)
        return now_s - max(self._listening_since, view.heard_s if view is not None else 0.0)

    def is_silent(self, replica_id: str, now_s: float) -> bool:
        return self.silence_of(replica_id, now_s) > self._silence_s

    def max_total_tokens(self, now_s: float) -> int | None:
        """The longest sequence that some replica can hold; None while none has said so."""
        return max((view.load.max_total_tokens for view in self.replicas(now_s)), default=0) or None

    def why_not_ready(self, now_s: float) -> str | None:
        """None when a request would be routed now; else what is missing."""
        ready = {beat.role for beat in self.members(now_s) if beat.state is ServiceState.READY}
        for role in NEEDED_ROLES:
            if role not in ready:
                return f"no {role} is ready"
        replicas = list(self.replicas(now_s))
        if not replicas:
            return "no replica is running"
        accepting = [view for view in replicas if view.load.accepting]
        if not accepting:
            return f"none of {len(replicas)} replicas accepts requests"
        stalled_s = min(now_s - view.moved_s for view in accepting)
        if stalled_s > self._stall_s:
            return f"no replica has made a step for {stalled_s:.0f} s"
        return None
