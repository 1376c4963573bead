"""The tokenizer on the bus: requests that wait together are answered together, in threads beside the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple

import msgspec

from services.tokenizer.config import TokenizerConfig
from services.tokenizer.core import TokenizerCore
from shared import subjects
from shared.bus import Bus, BusError, Delivery, PayloadTooLarge, Subscription
from shared.inbox import Inbox
from shared.messages.cluster import ServiceState
from shared.messages.packing import pack
from shared.messages.tokenization import (
    EncodeFailed,
    EncodeRefused,
    EncodeReply,
    EncodeRequest,
    unpack_encode_request,
)
from shared.service import Info, Service
from shared.telemetry import get_logger

QUEUE_GROUP = "tokenizer"
_MAX_REFUSALS = 10_000
"""Refusals not yet sent; in a flood beyond that the gateway's own timeout answers."""

log = get_logger(__name__)


class _Job(NamedTuple):
    reply: str
    request: EncodeRequest
    num_bytes: int


class _Answer(NamedTuple):
    reply: str
    answer: EncodeReply


class TokenizerActor(Service):
    """One member of the tokenizer group: any of them can answer any request."""

    role: ClassVar[str] = "tokenizer"

    def __init__(self, config: TokenizerConfig, core: TokenizerCore, bus: Bus) -> None:
        self.config = config
        self.instance = config.instance
        self.core = core
        self._bus = bus
        self._state = ServiceState.STARTING
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(config.max_waiting)
        self._refusals: Inbox[_Answer] = Inbox(_MAX_REFUSALS)
        self._subscription: Subscription | None = None
        self._num_answered = 0
        self._num_refused = 0

    @property
    def state(self) -> ServiceState:
        return self._state

    @property
    def stats(self) -> Info:
        return {
            "num_answered": self._num_answered,
            "num_refused": self._num_refused,
            "num_waiting": self._jobs.qsize(),
        }

    async def run(self) -> None:
        """Answer until cancelled."""
        subject = subjects.tokenizer_encode(self.config.model)
        threads = ThreadPoolExecutor(self.config.num_threads, thread_name_prefix="tokenizer")
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self.config.num_threads):
                    tasks.create_task(self._encode(threads), name=f"tokenizer {index}")
                tasks.create_task(self._refuse(), name="tokenizer refusals")
                self._subscription = await self._bus.subscribe(subject, self._take, queue=QUEUE_GROUP)
                self._state = ServiceState.READY
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # to wait would block the loop behind a long text

    async def drain(self, timeout_s: float) -> None:
        """Leave the queue group and answer what was received."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        async with asyncio.timeout(timeout_s):
            await self._jobs.join()

    def _take(self, delivery: Delivery) -> None:
        """Bus callback: queue the request, or a refusal."""
        try:
            request = unpack_encode_request(delivery.payload)
        except (msgspec.DecodeError, RecursionError) as error:
            self._refusals.append(_Answer(delivery.reply, EncodeFailed(message=f"not an EncodeRequest: {error}")))
            return
        try:
            self._jobs.put_nowait(_Job(delivery.reply, request, len(delivery.payload)))
        except asyncio.QueueFull:
            limit = self.config.max_waiting
            refused = EncodeRefused(message=f"{limit} requests wait in this tokenizer, its limit is {limit}")
            self._refusals.append(_Answer(delivery.reply, refused))

    async def _encode(self, threads: ThreadPoolExecutor) -> None:
        """One of `num_threads` alike: answers batch after batch."""
        loop = asyncio.get_running_loop()
        while True:
            batch = self._fill(await self._jobs.get())
            requests = [job.request for job in batch]
            answers = await loop.run_in_executor(threads, self.core.answer, requests)
            for job, answer in zip(batch, answers, strict=True):
                await self._publish(_Answer(job.reply, answer))
                self._jobs.task_done()
            self._num_answered += len(batch)

    def _fill(self, first: _Job) -> list[_Job]:
        """`first` and the jobs that wait behind it, up to `max_batch_bytes`."""
        batch, num_bytes = [first], first.num_bytes
        while num_bytes < self.config.max_batch_bytes and not self._jobs.empty():
            batch.append(self._jobs.get_nowait())
            num_bytes += batch[-1].num_bytes
        return batch

    async def _refuse(self) -> None:
        while True:
            for answer in await self._refusals.take_ready():
                self._num_refused += 1
                await self._publish(answer)

    async def _publish(self, answer: _Answer) -> None:
        try:
            await self._bus.publish(answer.reply, pack(answer.answer))
        except PayloadTooLarge as error:
            message = f"the answer has {error.size} bytes, more than the {error.limit} that the bus takes"
            await self._publish(_Answer(answer.reply, EncodeFailed(message=message)))
        except BusError as error:
            # The gateway hears nothing, times out and asks again: encoding is idempotent.
            log.warning("could not answer", error=str(error))
