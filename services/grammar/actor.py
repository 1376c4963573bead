"""The grammar service on the bus: equal questions are answered once, each within a bounded time."""

import asyncio
import contextlib
import time
from typing import ClassVar

from services.grammar.cache import AnswerCache
from services.grammar.config import GrammarConfig
from services.grammar.pool import PoolBusy, VettingFailed, VettingPool
from services.grammar.vetting import Task
from shared import subjects
from shared.bus import Bus, BusError, Delivery, Subscription
from shared.inbox import Inbox
from shared.messages.cluster import ServiceState
from shared.messages.constraints import ConstraintRefused
from shared.messages.packing import pack
from shared.service import Info, Service
from shared.telemetry import get_logger

QUEUE_GROUP = "grammar"
RETRY_AFTER_S = 1.0
FAILURE_HOLDS_MS = 60_000
"""A constraint that cost a process is refused for this long without another try: the machine may just have been busy."""

log = get_logger(__name__)


class GrammarActor(Service):
    """One member of the grammar group."""

    role: ClassVar[str] = "grammar"

    def __init__(self, config: GrammarConfig, bus: Bus) -> None:
        self.config = config
        self.instance = config.instance
        task = Task(model_path=config.model_path, tool_format=config.tool_format, limits=config.limits)
        self._bus = bus
        self._pool = VettingPool(task, config.num_processes, config.vet_timeout_s, config.answer_timeout_s)
        self._cache = AnswerCache(config.max_cached, config.max_cached_mib * 1024 * 1024)
        self._inbox: Inbox[Delivery] = Inbox(2 * config.max_waiting)
        self._waiting: dict[bytes, list[str]] = {}  # reply subjects of those who asked what is being vetted, by key
        self._num_open = 0  # asked and not yet answered
        self._settled = asyncio.Event()
        self._state = ServiceState.STARTING
        self._subscription: Subscription | None = None
        self._num_answered = 0

    @property
    def state(self) -> ServiceState:
        return self._state

    @property
    def info(self) -> Info:
        return {"tool_format": self.config.tool_format}

    @property
    def stats(self) -> Info:
        return {
            "num_answered": self._num_answered,
            "num_waiting": self._num_open,
            "num_cached": len(self._cache),
            "num_cached_bytes": self._cache.num_bytes,
            "num_vetted": self._pool.num_vetted,
            "num_killed": self._pool.num_killed,
        }

    async def run(self) -> None:
        """Answer until cancelled."""
        await self._pool.start()
        try:
            subject = subjects.grammar_compile(self.config.model)
            self._subscription = await self._bus.subscribe(subject, self._take, queue=QUEUE_GROUP)
            self._state = ServiceState.READY
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for delivery in await self._inbox.take_ready():
                        await self._handle(delivery, tasks)
        finally:
            await self._pool.close()

    async def drain(self, timeout_s: float) -> None:
        """Leave the queue group and answer what was asked."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s if self._num_open else 0):
                await self._settled.wait()

    def _take(self, delivery: Delivery) -> None:
        if not delivery.reply or not self._inbox.append(delivery):
            log.warning("request dropped", reason="inbox full" if delivery.reply else "no reply subject")
            return
        self._num_open += 1
        self._settled.clear()

    async def _handle(self, delivery: Delivery, tasks: asyncio.TaskGroup) -> None:
        key = AnswerCache.key(delivery.payload)
        answer = self._cache.get(key, self._now_ms())
        if answer is not None:
            await self._answer(delivery.reply, answer)
        elif self._num_open > self.config.max_waiting:
            message = f"{self._num_open} constraints wait to be compiled, the limit is {self.config.max_waiting}"
            await self._answer(delivery.reply, _busy(message))
        elif key in self._waiting:
            self._waiting[key].append(delivery.reply)
        else:
            self._waiting[key] = [delivery.reply]
            tasks.create_task(self._vet(key, delivery.payload), name="vet")

    async def _vet(self, key: bytes, payload: bytes) -> None:
        try:
            answer = await self._pool.vet(payload)
            self._cache.put(key, answer)
        except VettingFailed as error:
            log.warning("a constraint cost its vetting process", error=str(error), num_bytes=len(payload))
            answer = pack(
                ConstraintRefused(message="the constraint is too complex: compiling it took too much time or memory")
            )
            self._cache.put(key, answer, until_ms=self._now_ms() + FAILURE_HOLDS_MS)
        except PoolBusy as error:
            answer = _busy(str(error))
        for reply in self._waiting.pop(key):
            await self._answer(reply, answer)

    async def _answer(self, reply: str, answer: bytes) -> None:
        try:
            await self._bus.publish(reply, answer)
        except BusError as error:
            # The gateway asks again; the answer is in the cache.
            log.warning("could not answer", error=str(error))
        self._num_answered += 1
        self._num_open -= 1
        if self._num_open == 0:
            self._settled.set()

    @staticmethod
    def _now_ms() -> int:
        return time.monotonic_ns() // 1_000_000


def _busy(message: str) -> bytes:
    return pack(ConstraintRefused(message=message, retry_after_s=RETRY_AFTER_S))
