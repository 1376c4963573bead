"""The scheduler on the bus: messages become events, effects become messages, time becomes ticks."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar, assert_never

import msgspec

from services.scheduler import events as ev
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from services.scheduler.lease_keeper import LeaseKeeper
from services.scheduler.planner import Limits
from services.scheduler.presence import Presence
from services.scheduler.settings import Settings
from services.scheduler.usage_log import UsageLog
from services.scheduler.waiting import order_key
from shared import subjects
from shared.bus import Bus, BusDisconnected, Delivery, PayloadTooLarge
from shared.inbox import Inbox
from shared.messages.cluster import Heartbeat, KvSnapshot, ServiceState, unpack_heartbeat
from shared.messages.execution import Claim, Lapsed, Step, unpack_worker_outbox
from shared.messages.generation import (
    Drain,
    FlushCache,
    RejectCode,
    Rejected,
    Submit,
    unpack_replica_inbox,
)
from shared.messages.packing import pack
from shared.service import Info, Service
from shared.telemetry import get_logger

log = get_logger(__name__)

TICK_S = 0.1
GC_THRESHOLD = 100_000
"""New container objects between two collections: thousands of steps instead of a few."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the actor itself has to say, without asking the core."""

    reply_to: str
    message: Rejected | KvSnapshot


class SchedulerActor(Service):
    """One replica's scheduler.

    `bus` carries everything but steps and results; these go over `step_bus`, a connection of their own, so that no
    bulk message delays a step, and with hardly any send buffer, so that no stale step is sent after an outage.
    """

    role: ClassVar[str] = "scheduler"

    def __init__(self, config: SchedulerConfig, bus: Bus, step_bus: Bus) -> None:
        self.config = config
        self.instance = config.instance
        self.replica_id = config.replica_id or config.instance
        self._bus = bus
        self._step_bus = step_bus
        self.core = SchedulerCore(_settings(config, self.replica_id))
        self._inbox: Inbox[ev.Event | Answer] = Inbox(
            2 * config.max_inbox
        )  # the second half is for what must not be refused
        silence_ms = int(config.silence_s * 1000)
        self._gateways = Presence(silence_ms)
        claim = Claim(replica_id=self.replica_id, scheduler_instance=config.instance)
        self._lease_keeper = LeaseKeeper(bus, config.model, claim, config.group, silence_ms)
        self._usage = UsageLog(self.replica_id)
        self._steps: dict[int, Step] = {}
        """Unanswered steps by number, for sending again after an outage."""
        self._drained = asyncio.Event()
        self._wall_offset_ms = (time.time_ns() - time.monotonic_ns()) // 1_000_000

    # ---------------------------------------------------------------- what the host asks

    @property
    def state(self) -> ServiceState:
        return ServiceState.READY if self.core.lease else ServiceState.STARTING

    @property
    def epoch(self) -> int:
        return self.core.epoch

    @property
    def info(self) -> Info:
        load = self.core.load()
        lease = self.core.lease
        return {
            "replica_id": self.replica_id,
            "group": lease.group if lease else "",
            "policy": self.config.policy,
            "window": self.core.settings.window,
            "num_slots": load.num_slots,
            "max_total_tokens": load.max_total_tokens,
        }

    @property
    def stats(self) -> Info:
        return {name: value for name, value in msgspec.structs.asdict(self.core.load()).items() if name != "replica_id"}

    def set_accepting(self, accepting: bool) -> bool:
        self.core.is_draining = not accepting
        return True

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work and finish what is here; what is not done in time is taken up by another replica."""
        self._inbox.append(Drain())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()

    async def run(self) -> None:
        # Trees of many small objects make full collections long, and reference counting frees nearly all of them anyway.
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        model = self.config.model
        self._bus.on_connection_change(self._on_bus_change)
        self._step_bus.on_connection_change(self._on_step_bus_change)
        results = subjects.replica_results(model, self.replica_id)
        await self._step_bus.subscribe(results, self._on_result)
        await self._bus.subscribe(subjects.replica_kv_snapshot(model, self.replica_id), self._on_snapshot_request)
        await self._bus.subscribe(subjects.heartbeat(model, role="worker"), self._on_worker_heartbeat)
        await self._bus.subscribe(subjects.heartbeat(model, role="gateway"), self._on_gateway_heartbeat)
        await self._bus.subscribe(subjects.replica_requests(model, self.replica_id), self._on_request)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_lease(), name="lease")
            tasks.create_task(self._tick(), name="tick")
            while True:
                items = await self._inbox.take_ready()
                events = [item for item in items if not isinstance(item, Answer)]
                for effect in self.core.step(self._now_ms(), events):
                    await self._carry_out(effect)
                if self.core.is_draining and self.core.is_idle:
                    self._drained.set()
                for answer in items:
                    if isinstance(answer, Answer):
                        await self._publish(self._bus, answer.reply_to, pack(answer.message))

    # ---------------------------------------------------------------- time

    def _now_ms(self) -> int:
        """Unix time that never goes back."""
        return time.monotonic_ns() // 1_000_000 + self._wall_offset_ms

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not (self._bus.connected and self._step_bus.connected):
                continue  # nobody can be heard: silence means nothing
            now_ms = self._now_ms()
            for gateway_id in self._gateways.take_silent(now_ms):
                self._inbox.append(ev.GatewayLost(gateway_id))
            if self._lease_keeper.is_silent(now_ms):
                self._lose_worker("no heartbeat")
            self._inbox.append(ev.Tick())

    async def _keep_lease(self) -> None:
        while True:
            if self.core.lease is None and not self.core.is_draining and self._bus.connected:
                lease = await self._lease_keeper.claim(self._now_ms())
                if lease is not None:
                    log.info("worker claimed", group=lease.group, epoch=lease.epoch, num_slots=lease.num_slots)
                    self._steps.clear()
                    self._inbox.append(ev.WorkerJoined(lease))
            await asyncio.sleep(TICK_S)

    def _lose_worker(self, reason: str, *, is_death: bool = True) -> None:
        log.warning("worker lost", reason=reason, epoch=self.core.epoch)
        self._lease_keeper.drop()
        self._inbox.append(ev.WorkerLost(reason, is_death))

    def _on_bus_change(self, connected: bool) -> None:
        if connected:
            now_ms = self._now_ms()
            self._gateways.heard_all(now_ms)
            self._lease_keeper.reconnected(now_ms)

    def _on_step_bus_change(self, connected: bool) -> None:
        if connected:
            self._inbox.append(ev.Reconnected())

    # ---------------------------------------------------------------- messages in

    def _on_result(self, delivery: Delivery) -> None:
        message = self._unpack(unpack_worker_outbox, delivery)
        match message:
            case None:
                pass
            case Lapsed(epoch=epoch, reason=reason, is_handover=is_handover):
                if epoch == self.core.epoch:
                    self._lose_worker(reason, is_death=not is_handover)
            case _:
                if message.epoch == self.core.epoch:
                    self._steps.pop(message.seq, None)
                self._inbox.append(ev.StepDone(message))

    def _on_request(self, delivery: Delivery) -> None:
        message = self._unpack(unpack_replica_inbox, delivery)
        match message:
            case None:
                if delivery.reply:
                    self._refuse(delivery.reply, RejectCode.INVALID, "the message cannot be read", retry_after_s=None)
            case Submit():
                if len(self._inbox) >= self.config.max_inbox:
                    what = f"{len(self._inbox)} messages wait in the scheduler, the limit is {self.config.max_inbox}"
                    self._refuse(delivery.reply, RejectCode.QUEUE_FULL, what, retry_after_s=1.0)
                    return
                self._gateways.heard(message.gateway_id, self._now_ms())
                self._inbox.append(ev.Submitted(message, delivery.reply))
            case FlushCache():
                self._inbox.append(ev.FlushRequested(message, delivery.reply))
            case _:
                self._inbox.append(message)

    def _refuse(self, reply_to: str, code: RejectCode, message: str, retry_after_s: float | None) -> None:
        """Answer from a callback, which cannot wait. In a flood so great that not even answers fit, deadlines answer."""
        rejected = Rejected(code=code, message=message, retry_after_s=retry_after_s)
        self._inbox.append(Answer(reply_to, rejected))

    def _on_snapshot_request(self, delivery: Delivery) -> None:
        if delivery.reply:
            self._inbox.append(Answer(delivery.reply, self.core.kv_snapshot()))

    def _on_worker_heartbeat(self, delivery: Delivery) -> None:
        heartbeat: Heartbeat | None = self._unpack(unpack_heartbeat, delivery)
        if heartbeat is not None:
            self._lease_keeper.heard(heartbeat, self._now_ms())

    def _on_gateway_heartbeat(self, delivery: Delivery) -> None:
        heartbeat: Heartbeat | None = self._unpack(unpack_heartbeat, delivery)
        if heartbeat is not None:
            self._gateways.heard(heartbeat.instance, self._now_ms())

    @staticmethod
    def _unpack(unpack: Callable[[bytes], T], delivery: Delivery) -> T | None:
        try:
            return unpack(delivery.payload)
        except msgspec.DecodeError as error:
            log.warning("unreadable message", subject=delivery.subject, error=str(error))
            return None

    # ---------------------------------------------------------------- messages out

    async def _carry_out(self, effect: ev.Effect) -> None:
        model = self.config.model
        match effect:
            case ev.SendStep(step=step):
                self._steps[step.seq] = step
                await self._publish(self._step_bus, subjects.replica_steps(model, self.replica_id), pack(step))
            case ev.AskResend(resend=resend):
                # A lost step is executed now; one that was executed is answered again: the worker knows which.
                for step in list(self._steps.values()):
                    await self._publish(self._step_bus, subjects.replica_steps(model, self.replica_id), pack(step))
                await self._publish(self._step_bus, subjects.replica_steps(model, self.replica_id), pack(resend))
            case ev.SendFrame(gateway_id=gateway_id, frame=frame):
                await self._publish(self._bus, subjects.gateway_frames(model, gateway_id), pack(frame))
            case ev.Reply(reply_to=reply_to, message=message):
                await self._publish(self._bus, reply_to, pack(message))
            case ev.PublishKv(events=events):
                await self._publish(self._bus, subjects.replica_kv(model, self.replica_id), pack(events))
            case ev.PublishLoad(load=load):
                await self._publish(self._bus, subjects.replica_load(model, self.replica_id), pack(load))
            case ev.ReclaimWorker(reason=reason):
                log.warning("worker given up", reason=reason)
                self._lease_keeper.drop()
            case ev.RecordUsage():
                self._usage.record(effect)
            case _:
                assert_never(effect)

    async def _publish(self, bus: Bus, subject: str, payload: bytes) -> None:
        """Send, or leave it: each receiver notices a gap (positions, numbers, deadlines) and asks again."""
        try:
            await bus.publish(subject, payload)
        except BusDisconnected:
            log.debug("not sent, the bus is away", subject=subject)
        except PayloadTooLarge as error:
            log.error("message too large", subject=subject, size=error.size, limit=error.limit)


def _settings(config: SchedulerConfig, replica_id: str) -> Settings:
    return Settings(
        replica_id=replica_id,
        limits=Limits(
            max_running_reqs=config.max_running_reqs,
            max_prefill_tokens=config.max_prefill_tokens,
            reserve_slots=config.reserve_slots,
        ),
        order_key=order_key(config.policy, config.aging_ms),
        window=2 if config.overlap else 1,
        max_waiting_reqs=config.max_waiting_reqs,
        min_step_deadline_ms=int(config.step_deadline_s * 1000),
        max_worker_deaths=config.max_worker_deaths,
        worker_wait_ms=int(config.worker_wait_s * 1000),
    )
