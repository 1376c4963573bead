"""The worker on the bus: claims and steps come in, results go out; the executor's thread does the computing."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import ClassVar, assert_never

import msgspec

from services.worker.config import WorkerConfig
from services.worker.engine import Engine
from services.worker.events import (
    Claimed,
    Crashed,
    Event,
    HolderAlive,
    Opened,
    Reconnected,
    Report,
    Reset,
    StepRefused,
    Tick,
    Unreadable,
)
from services.worker.executor import Executor
from services.worker.lease import LeaseKeeper, Verdict
from services.worker.runner import ModelLimits
from shared import subjects
from shared.bus import Bus, BusDisconnected, Delivery, PayloadTooLarge, Subscription
from shared.inbox import Inbox
from shared.messages.cluster import ServiceState, unpack_heartbeat
from shared.messages.execution import (
    Claim,
    Lapsed,
    Lease,
    Refused,
    Resend,
    Step,
    StepResult,
    unpack_claim,
    unpack_worker_inbox,
)
from shared.messages.packing import pack
from shared.service import Info, Service
from shared.telemetry import get_logger

log = get_logger(__name__)

MAX_INBOX = 256
"""Far more than the two steps and few claims that may be under way: a full inbox is somebody's fault."""
CHECKS_PER_TTL = 10
JOIN_TIMEOUT_S = 2.0
QUIET_S = 1.0
"""A draining worker gives its lease back when no step has come for this long."""


class WorkerActor(Service):
    """One worker group, of one rank."""

    role: ClassVar[str] = "worker"

    def __init__(self, config: WorkerConfig, bus: Bus, open_engine: Callable[[], Engine]) -> None:
        """`open_engine` is called in the executor's thread and may take its time."""
        self.config = config
        self.instance = config.instance
        self.group = config.group or config.instance
        self._bus = bus
        self._lease = LeaseKeeper(int(config.lease_ttl_s * 1000))
        self._limits: ModelLimits | None = None
        self._inbox: Inbox[Event] = Inbox(MAX_INBOX)
        self._executor = Executor(open_engine, self._report_from(asyncio.get_running_loop()))
        self._subscriptions: list[Subscription] = []
        """What belongs to the current lease: its steps, its holder's heartbeats."""
        self._draining = False
        self._stepped = asyncio.Event()
        self._num_steps = 0
        self._wait_us = 0
        self._run_us = 0

    # ---------------------------------------------------------------- what the host asks

    @property
    def state(self) -> ServiceState:
        if self._draining:
            return ServiceState.DRAINING
        return ServiceState.STARTING if self._limits is None else ServiceState.READY

    @property
    def epoch(self) -> int:
        return self._lease.epoch if self._lease.holder is not None else 0

    @property
    def info(self) -> Info:
        return {
            "group": self.group,
            "free": int(self.state is ServiceState.READY and self._lease.holder is None),
            "model": self.config.model,
            "model_kind": self.config.model_kind,
            "num_slots": self._limits.num_slots if self._limits else 0,
            "context_len": self._limits.context_len if self._limits else 0,
        }

    @property
    def stats(self) -> Info:
        return {"num_steps": self._num_steps, "wait_us": self._wait_us, "run_us": self._run_us}

    async def run(self) -> None:
        """Load the model, then take leases and steps until cancelled. A crash of the executor ends it."""
        self._executor.start()
        self._bus.on_connection_change(self._on_connection_change)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick(), name="tick")
                while True:
                    for event in await self._inbox.take_ready():
                        await self._handle(event)
        finally:
            self._executor.stop()
            await asyncio.to_thread(self._executor.join, JOIN_TIMEOUT_S)

    async def drain(self, timeout_s: float) -> None:
        """Take no new lease; serve the current one until its scheduler has no more steps, then give it back."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._lease.holder is not None:
                    self._stepped.clear()
                    await asyncio.wait_for(self._stepped.wait(), QUIET_S)
        await self._end_lease("the worker shuts down", is_handover=True)

    # ---------------------------------------------------------------- events in

    def _report_from(self, loop: asyncio.AbstractEventLoop) -> Callable[[Report], None]:
        def report(outcome: Report) -> None:
            # Once the loop is closed there is nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._append, outcome)

        return report

    def _append(self, event: Event) -> None:
        if not self._inbox.append(event):
            log.error("inbox full", lost=type(event).__name__, limit=MAX_INBOX)

    def _on_claim(self, delivery: Delivery) -> None:
        try:
            claim = unpack_claim(delivery.payload)
        except msgspec.DecodeError as error:
            log.warning("unreadable claim", error=str(error))
            return
        self._append(Claimed(claim, delivery.reply))

    def _on_step(self, delivery: Delivery) -> None:
        try:
            self._append(unpack_worker_inbox(delivery.payload))
        except msgspec.DecodeError as error:
            self._append(Unreadable(str(error)))

    def _on_heartbeat(self, delivery: Delivery) -> None:
        try:
            heartbeat = unpack_heartbeat(delivery.payload)
        except msgspec.DecodeError as error:
            log.warning("unreadable heartbeat", error=str(error))
            return
        # A scheduler that leads another worker by now is alive, but no longer our holder.
        if heartbeat.epoch == self._lease.epoch:
            self._append(HolderAlive())

    def _on_connection_change(self, connected: bool) -> None:
        if connected:
            self._append(Reconnected())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.lease_ttl_s / CHECKS_PER_TTL)
            if self._bus.connected:
                self._append(Tick())

    # ---------------------------------------------------------------- what they cause

    async def _handle(self, event: Event) -> None:
        match event:
            case Step():
                await self._take_step(event)
            case StepResult():
                await self._publish_result(event)
            case Claimed(claim=claim, reply_to=reply_to):
                await self._publish(reply_to, pack(await self._answer(claim)))
            case HolderAlive():
                self._lease.keep_alive(_now_ms())
            case Tick():
                if self._lease.has_lapsed(_now_ms()):
                    await self._end_lease(f"nothing heard of the scheduler for {self.config.lease_ttl_s:g} s")
            case Resend():
                await self._resend(event)
            case Reconnected():
                self._lease.keep_alive(_now_ms())
                for result in self._lease.kept_from(1):
                    await self._publish_to_holder(result)
            case Unreadable(reason=reason):
                await self._end_lease(f"a step cannot be read: {reason}")
            case StepRefused(epoch=epoch, seq=seq, reason=reason):
                if epoch == self._lease.epoch:
                    await self._end_lease(f"step {seq} makes no sense: {reason}")
            case Opened(limits=limits):
                self._limits = limits
                await self._bus.subscribe(subjects.worker_claim(self.config.model, self.group), self._on_claim)
                log.info("model ready", num_slots=limits.num_slots, context_len=limits.context_len)
            case Crashed(error=error):
                raise error
            case _:
                assert_never(event)

    async def _answer(self, claim: Claim) -> Lease | Refused:
        assert self._limits is not None, "claims are heard once the model is loaded"
        if self._draining:
            return Refused(reason="draining")
        if (refused := self._lease.claim(claim, _now_ms(), _unix_ms())) is not None:
            return refused
        await self._forget_holder()
        if not self._executor.submit(Reset()):
            self._lease.end()
            return Refused(reason="busy with steps of an earlier lease")
        model = self.config.model
        for subject, callback in (
            (subjects.replica_steps(model, claim.replica_id), self._on_step),
            (subjects.heartbeat(model, "scheduler", claim.scheduler_instance), self._on_heartbeat),
        ):
            self._subscriptions.append(await self._bus.subscribe(subject, callback))
        log.info("leased", scheduler=claim.scheduler_instance, replica=claim.replica_id, epoch=self._lease.epoch)
        return Lease(
            group=self.group,
            epoch=self._lease.epoch,
            num_slots=self._limits.num_slots,
            context_len=self._limits.context_len,
            vocab_size=self._limits.vocab_size,
            end_token_ids=self._limits.end_token_ids,
            ttl_ms=self._lease.ttl_ms,
        )

    async def _take_step(self, step: Step) -> None:
        verdict, reason = self._lease.take(step)
        match verdict:
            case Verdict.RUN:
                self._lease.keep_alive(_now_ms())
                self._stepped.set()
                if not self._executor.submit(step):
                    await self._end_lease("more steps were sent than the window allows")
            case Verdict.REPEATED:
                for result in self._lease.kept_from(step.seq)[:1]:
                    await self._publish_to_holder(result)
            case Verdict.LAPSED:
                await self._end_lease(reason)
            case Verdict.FOREIGN:
                log.debug("not our step", seq=step.seq, reason=reason)

    async def _publish_result(self, result: StepResult) -> None:
        self._num_steps += 1
        self._wait_us += result.wait_us
        self._run_us += result.run_us
        payload = pack(result)
        if self._lease.keep(result.epoch, result.seq, payload):
            await self._publish_to_holder(payload)

    async def _resend(self, resend: Resend) -> None:
        if resend.epoch != self._lease.epoch:
            log.debug("not our results are asked for", epoch=resend.epoch, own_epoch=self._lease.epoch)
        elif not self._lease.can_resend(resend.seq):
            await self._end_lease(f"the result of step {resend.seq} is no longer kept")
        else:
            for result in self._lease.kept_from(resend.seq):
                await self._publish_to_holder(result)

    async def _end_lease(self, reason: str, *, is_handover: bool = False) -> None:
        """Tell the holder that the lease is over, and be free for the next claim."""
        if self._lease.holder is None:
            return
        log.warning("lease ended", epoch=self._lease.epoch, reason=reason)
        lapsed = Lapsed(epoch=self._lease.epoch, seq=self._lease.next_seq, reason=reason, is_handover=is_handover)
        await self._publish_to_holder(pack(lapsed))
        self._lease.end()
        await self._forget_holder()

    async def _forget_holder(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()

    async def _publish_to_holder(self, payload: bytes) -> None:
        if (holder := self._lease.holder) is not None:
            await self._publish(subjects.replica_results(self.config.model, holder.replica_id), payload)

    async def _publish(self, subject: str, payload: bytes) -> None:
        try:
            await self._bus.publish(subject, payload)
        except BusDisconnected:
            # Results are kept and go out when the bus is back; a claim's answer has timed out by then.
            log.info("not published, the bus is away", subject=subject)
        except PayloadTooLarge as error:
            log.error("not published", error=str(error))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
