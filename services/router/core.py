"""Which replica serves a request: the lowest cost, counting what is cached and what is already on its way.

Pure: events in, effects out; time and chance come with the events. A wrong or missing view of the caches costs affinity and
nothing else: every live replica stays a candidate for every request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from services.router.config import RouterConfig
from services.router.kv_view import KvView
from services.router.replica import Replica
from shared.kv_hashes import DEFAULT_BLOCK_SIZE, block_hashes
from shared.messages.cluster import Booked, Heartbeat, KvEvents, KvSnapshot, Load, ServiceState
from shared.messages.generation import RejectCode, Rejected, Submit
from shared.messages.packing import num_int32

RETRY_AFTER_S = 1.0
SCHEDULER_ROLE = "scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A gateway wants `submit` served; the scheduler that takes it answers to `reply`.

    payload      `submit` as it came, sent on unchanged
    deadline_ms  on the clock of `RouterCore.step`, None for no deadline
    draw         a random number in [0, 1) that settles ties
    """

    submit: Submit
    payload: bytes
    reply: str
    deadline_ms: int | None
    draw: float


Event = Route | Load | Heartbeat | KvEvents | KvSnapshot | Booked


@dataclass(frozen=True, slots=True)
class Forward:
    replica_id: str
    payload: bytes
    reply: str


@dataclass(frozen=True, slots=True)
class Reject:
    reply: str
    answer: Rejected


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    replica_id: str


@dataclass(frozen=True, slots=True)
class Announce:
    """To the other routers."""

    booked: Booked


Effect = Forward | Reject | AskSnapshot | Announce


class RouterCore:
    def __init__(self, router_id: str, config: RouterConfig) -> None:
        self.router_id = router_id
        self.config = config
        self.replicas: dict[str, Replica] = {}
        self._effects: list[Effect] = []

    def step(self, now_ms: int, events: Sequence[Event]) -> list[Effect]:
        """Take in what happened, in order; the effects are in the order to carry them out. `now_ms` never goes back."""
        self._forget_silent(now_ms)
        for event in events:
            match event:
                case Route():
                    self._route(event, now_ms)
                case Load():
                    self._take_load(event, now_ms)
                case Heartbeat():
                    self._take_heartbeat(event)
                case KvEvents():
                    if replica := self.replicas.get(event.replica_id):
                        replica.kv.apply(event)
                        self._sync(replica, now_ms)
                case KvSnapshot():
                    if replica := self.replicas.get(event.replica_id):
                        replica.kv.replace(event)
                case Booked():
                    if event.router_id != self.router_id and (replica := self.replicas.get(event.replica_id)):
                        replica.book(now_ms, event.num_prefill_tokens)
                case _:
                    assert_never(event)
        effects, self._effects = self._effects, []
        return effects

    def _route(self, route: Route, now_ms: int) -> None:
        if route.deadline_ms is not None and now_ms >= route.deadline_ms:
            self._reject(route, RejectCode.DEADLINE, "the request's deadline passed before it was routed", retry=False)
            return
        candidates = self._candidates(route.submit, now_ms)
        if not candidates:
            known = len(self.replicas)
            message = (
                f"no replica takes requests now ({known} known, none available)" if known else "no replica is running"
            )
            self._reject(route, RejectCode.NO_REPLICA, message, retry=True)
            return
        replica, num_uncached = self._cheapest(candidates, route)
        replica.book(now_ms, num_uncached)
        replica_id = replica.load.replica_id
        self._effects.append(Forward(replica_id, route.payload, route.reply))
        self._effects.append(
            Announce(Booked(router_id=self.router_id, replica_id=replica_id, num_prefill_tokens=num_uncached))
        )

    def _candidates(self, submit: Submit, now_ms: int) -> list[Replica]:
        """Available replicas; narrowed to those heard just now, and to those that can hold the request, where there are any."""
        candidates = [r for r in self.replicas.values() if r.is_available(now_ms, self.config.silence_s)]
        candidates = [r for r in candidates if r.is_available(now_ms, self.config.suspect_s)] or candidates
        num_tokens = num_int32(submit.prompt) + submit.max_new_tokens
        # A replica that has not stated its limit (0) may hold anything; if none can, one of them refuses with both numbers.
        return [r for r in candidates if not 0 < r.load.max_total_tokens < num_tokens] or candidates

    def _cheapest(self, candidates: list[Replica], route: Route) -> tuple[Replica, int]:
        """The replica of lowest cost and the tokens it would have to prefill."""
        submit = route.submit
        tokens = submit.prompt + submit.resumed
        num_tokens = num_int32(tokens)
        # With one replica there is nothing to choose; hashing a long prompt is the router's largest cost.
        worth_hashing = len(candidates) > 1 and any(replica.kv.num_blocks for replica in candidates)
        hashes = block_hashes(submit.namespace, tokens) if worth_hashing else []
        best: list[tuple[Replica, int]] = []
        lowest = float("inf")
        for replica in candidates:
            # The last token of a prompt is computed even if all of it is cached.
            num_cached = min(replica.kv.count_leading(hashes) * DEFAULT_BLOCK_SIZE, num_tokens - 1)
            num_uncached = num_tokens - num_cached
            cost = replica.cost_s(num_uncached, self.config)
            if cost < lowest:
                best, lowest = [], cost
            if cost == lowest:
                best.append((replica, num_uncached))
        return best[int(route.draw * len(best))]

    def _take_load(self, load: Load, now_ms: int) -> None:
        replica = self.replicas.get(load.replica_id)
        if replica is None:
            replica = Replica(load=load, heard_ms=now_ms, kv=KvView(self.config.max_blocks))
            self.replicas[load.replica_id] = replica
        replica.take_load(load, now_ms, self.config.settle_ms)
        self._sync(replica, now_ms)

    def _take_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Only the state of a scheduler matters here, and it may say so before its Load does."""
        replica_id = heartbeat.info.get("replica_id", heartbeat.instance)
        if heartbeat.role == SCHEDULER_ROLE and (replica := self.replicas.get(str(replica_id))):
            replica.is_draining = heartbeat.state is ServiceState.DRAINING

    def _sync(self, replica: Replica, now_ms: int) -> None:
        """Ask for a snapshot where events were missed; again after a while if the answer was lost."""
        if replica.kv.is_synced:
            return
        if replica.asked_ms is None or now_ms - replica.asked_ms >= self.config.snapshot_interval_s * 1000:
            replica.asked_ms = now_ms
            self._effects.append(AskSnapshot(replica.load.replica_id))

    def _forget_silent(self, now_ms: int) -> None:
        silent = [i for i, r in self.replicas.items() if now_ms - r.heard_ms > self.config.silence_s * 1000]
        for replica_id in silent:
            del self.replicas[replica_id]

    def _reject(self, route: Route, code: RejectCode, message: str, *, retry: bool) -> None:
        answer = Rejected(code=code, message=message, retry_after_s=RETRY_AFTER_S if retry else None)
        self._effects.append(Reject(route.reply, answer))
