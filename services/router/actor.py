"""The router on the bus: what it hears becomes events, what the core decides becomes messages."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import ClassVar

import msgspec

from services.router.config import RouterConfig
from services.router.core import RETRY_AFTER_S, Announce, AskSnapshot, Effect, Event, Forward, Reject, Route, RouterCore
from shared import subjects
from shared.bus import Bus, BusError, Callback, Delivery, Subscription
from shared.inbox import Inbox
from shared.messages.cluster import (
    KvSnapshotRequest,
    ServiceState,
    unpack_booked,
    unpack_heartbeat,
    unpack_kv_events,
    unpack_kv_snapshot,
    unpack_load,
)
from shared.messages.generation import RejectCode, Rejected, Submit, unpack_replica_inbox
from shared.messages.packing import pack
from shared.service import Info, Service
from shared.telemetry import get_logger

QUEUE_GROUP = "router"
SNAPSHOT_TIMEOUT_S = 2.0

log = get_logger(__name__)


class RouterActor(Service):
    """One member of the router group: any of them can answer any Submit."""

    role: ClassVar[str] = "router"

    def __init__(self, config: RouterConfig, bus: Bus) -> None:
        self.config = config
        self.instance = config.instance
        self.core = RouterCore(config.instance, config)
        self._bus = bus
        self._state = ServiceState.STARTING
        self._inbox: Inbox[Event | Reject] = Inbox(2 * config.max_inbox)  # the second half is for refusals
        self._submits: Subscription | None = None
        self._snapshots: set[asyncio.Task[None]] = set()
        self._num_routed = 0
        self._num_rejected = 0

    @property
    def state(self) -> ServiceState:
        return self._state

    @property
    def info(self) -> Info:
        return {"num_replicas": len(self.core.replicas)}

    @property
    def stats(self) -> Info:
        return {"num_routed": self._num_routed, "num_rejected": self._num_rejected, "num_waiting": len(self._inbox)}

    async def run(self) -> None:
        """Route until cancelled."""
        model = self.config.model
        hears = [
            (subjects.replica_load(model), self._hearing(unpack_load)),
            (subjects.replica_kv(model), self._hearing(unpack_kv_events)),
            (subjects.heartbeat(model, role="scheduler"), self._hearing(unpack_heartbeat)),
            (subjects.router_peers(model), self._hearing(unpack_booked)),
        ]
        for subject, callback in hears:
            await self._bus.subscribe(subject, callback)
        self._submits = await self._bus.subscribe(subjects.router_submit(model), self._take_submit, queue=QUEUE_GROUP)
        self._state = ServiceState.READY
        try:
            while True:
                await self._work()
        finally:
            for task in self._snapshots:
                task.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Leave the queue group; what was received is still routed."""
        if self._submits is not None:
            await self._submits.unsubscribe()
        self._inbox.wake()

    async def _work(self) -> None:
        """One round: take what is there, decide, carry out."""
        items = await self._inbox.take_ready()
        refused = [item for item in items if isinstance(item, Reject)]
        events = [item for item in items if not isinstance(item, Reject)]
        for effect in (*refused, *self.core.step(self._now_ms(), events)):
            await self._carry_out(effect)

    async def _carry_out(self, effect: Effect) -> None:
        model = self.config.model
        try:
            match effect:
                case Forward(replica_id=replica_id, payload=payload, reply=reply):
                    self._num_routed += 1
                    await self._bus.publish(subjects.replica_requests(model, replica_id), payload, reply=reply)
                case Reject(reply=reply, answer=answer):
                    self._num_rejected += 1
                    await self._bus.publish(reply, pack(answer))
                case Announce(booked=booked):
                    await self._bus.publish(subjects.router_peers(model), pack(booked))
                case AskSnapshot(replica_id=replica_id):
                    task = asyncio.create_task(self._fetch_snapshot(replica_id), name=f"snapshot of {replica_id}")
                    self._snapshots.add(task)
                    task.add_done_callback(self._snapshots.discard)
        except BusError as error:
            # The gateway hears nothing, times out and submits again: to us when the bus is back, or to a peer.
            log.warning("could not publish", effect=type(effect).__name__, error=str(error))

    async def _fetch_snapshot(self, replica_id: str) -> None:
        subject = subjects.replica_kv_snapshot(self.config.model, replica_id)
        request = pack(KvSnapshotRequest(router_id=self.instance))
        try:
            answer = await self._bus.request(subject, request, timeout_s=SNAPSHOT_TIMEOUT_S)
            self._inbox.append(unpack_kv_snapshot(answer))
        except (BusError, msgspec.DecodeError) as error:
            # The core asks again while the view is out of step.
            log.info("no snapshot", replica=replica_id, error=str(error))

    def _take_submit(self, delivery: Delivery) -> None:
        try:
            submit = unpack_replica_inbox(delivery.payload)
        except msgspec.DecodeError as error:
            self._refuse(delivery.reply, RejectCode.INVALID, f"not a Submit: {error}", retry=False)
            return
        if not isinstance(submit, Submit) or not submit.prompt:
            self._refuse(delivery.reply, RejectCode.INVALID, "the router takes a Submit with a prompt", retry=False)
        elif len(self._inbox) >= self.config.max_inbox:
            message = f"{len(self._inbox)} messages wait in this router, its limit is {self.config.max_inbox}"
            self._refuse(delivery.reply, RejectCode.QUEUE_FULL, message, retry=True)
        else:
            left_ms = None if submit.deadline_ms is None else submit.deadline_ms - time.time_ns() // 1_000_000
            route = Route(
                submit=submit,
                payload=delivery.payload,
                reply=delivery.reply,
                deadline_ms=None if left_ms is None else self._now_ms() + left_ms,
                draw=random.random(),
            )
            self._inbox.append(route)

    def _hearing(self, unpack: Callable[[bytes], Event]) -> Callback:
        """A callback for news. What cannot be read, or finds the inbox full, is dropped: the next news replaces it."""

        def callback(delivery: Delivery) -> None:
            try:
                event = unpack(delivery.payload)
            except msgspec.DecodeError as error:
                log.warning("unreadable message", subject=delivery.subject, error=str(error))
                return
            if len(self._inbox) < self.config.max_inbox:
                self._inbox.append(event)

        return callback

    def _refuse(self, reply: str, code: RejectCode, message: str, *, retry: bool) -> None:
        """Queue an answer. In a flood so great that even refusals do not fit, the gateway's own deadline answers."""
        answer = Rejected(code=code, message=message, retry_after_s=RETRY_AFTER_S if retry else None)
        self._inbox.append(Reject(reply, answer))

    @staticmethod
    def _now_ms() -> int:
        return time.monotonic_ns() // 1_000_000
