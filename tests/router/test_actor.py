"""The router on a bus: submits reach a scheduler as they came, and its answer reaches the gateway directly."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.router.actor import RouterActor
from services.router.config import RouterConfig
from shared import subjects
from shared.bus import NoResponders
from shared.kv_hashes import block_hashes
from shared.messages.cluster import KvSnapshot, Load, unpack_booked
from shared.messages.generation import Abort, Accepted, RejectCode, Rejected, Submit, unpack_submit_reply
from shared.messages.packing import pack, pack_int32
from tests.support.memory_bus import MemoryBroker, MemoryBus

CONFIG = RouterConfig(instance="r1")
MODEL = CONFIG.model
PROMPT = pack_int32(range(100))


class Scheduler:
    """Answers as a scheduler does and notes what it got."""

    def __init__(self, broker: MemoryBroker, replica_id: str, cached: bytes = b"") -> None:
        self.bus = MemoryBus(broker)
        self.replica_id = replica_id
        self.cached = cached
        self.received: list[bytes] = []
        self._answers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.bus.subscribe(subjects.replica_requests(MODEL, self.replica_id), self._on_request)
        await self.bus.subscribe(subjects.replica_kv_snapshot(MODEL, self.replica_id), self._on_snapshot)

    async def report(self, **changes) -> None:
        quiet = dict.fromkeys(
            ("num_running_reqs", "num_waiting_reqs", "num_uncached_tokens", "num_used_slots", "num_cached_slots"), 0
        )
        load = Load(
            **{"replica_id": self.replica_id, "epoch": 1, "num_slots": 9999, "accepting": True, **quiet, **changes}
        )
        await self.bus.publish(subjects.replica_load(MODEL, self.replica_id), pack(load))

    def _on_request(self, delivery) -> None:
        self.received.append(delivery.payload)
        self._answer(delivery.reply, pack(Accepted(replica_id=self.replica_id, epoch=1)))

    def _on_snapshot(self, delivery) -> None:
        snapshot = KvSnapshot(replica_id=self.replica_id, epoch=1, number=4, stored=self.cached)
        self._answer(delivery.reply, pack(snapshot))

    def _answer(self, reply: str, payload: bytes) -> None:
        task = asyncio.ensure_future(self.bus.publish(reply, payload))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)


@asynccontextmanager
async def routing(config: RouterConfig = CONFIG) -> AsyncIterator[tuple[MemoryBroker, RouterActor]]:
    broker = MemoryBroker()
    actor = RouterActor(config, MemoryBus(broker))
    running = asyncio.create_task(actor.run())
    await until(lambda: actor.state == "ready")
    yield broker, actor
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert broker.errors == []


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # the condition is another task's state, with no event of its own
            await asyncio.sleep(0)


def submit(**changes) -> bytes:
    return pack(Submit(**{"request_id": "q", "gateway_id": "g", "prompt": PROMPT, "max_new_tokens": 4, **changes}))


async def ask(broker: MemoryBroker, payload: bytes):
    answer = await MemoryBus(broker).request(subjects.router_submit(MODEL), payload, timeout_s=1)
    return unpack_submit_reply(answer)


async def test_the_scheduler_gets_the_same_bytes_and_answers_the_gateway():
    async with routing() as (broker, actor):
        scheduler = Scheduler(broker, "a")
        await scheduler.start()
        await scheduler.report()
        await until(lambda: actor.core.replicas)
        assert await ask(broker, submit()) == Accepted(replica_id="a", epoch=1)
        assert scheduler.received == [submit()]


async def test_without_a_replica_the_gateway_gets_a_typed_answer():
    async with routing() as (broker, _):
        answer = await ask(broker, submit())
        assert isinstance(answer, Rejected)
        assert answer.code is RejectCode.NO_REPLICA


async def test_an_expired_submit_is_rejected():
    async with routing() as (broker, actor):
        scheduler = Scheduler(broker, "a")
        await scheduler.start()
        await scheduler.report()
        await until(lambda: actor.core.replicas)
        answer = await ask(broker, submit(deadline_ms=time.time_ns() // 1_000_000 - 1))
        assert answer.code is RejectCode.DEADLINE
        assert isinstance(await ask(broker, submit(deadline_ms=time.time_ns() // 1_000_000 + 60_000)), Accepted)


@pytest.mark.parametrize("payload", [b"\xc1", b"", pack(Abort(request_id="q")), submit(prompt=b"")])
async def test_what_is_no_submit_is_rejected(payload):
    async with routing() as (broker, _):
        assert (await ask(broker, payload)).code is RejectCode.INVALID


async def test_a_snapshot_is_fetched_from_a_new_replica_and_attracts_its_prefixes():
    async with routing() as (broker, actor):
        cached = array("Q", block_hashes("", PROMPT)).tobytes()
        schedulers = [Scheduler(broker, "a"), Scheduler(broker, "b", cached)]
        for scheduler in schedulers:
            await scheduler.start()
            await scheduler.report()
        await until(lambda: len(actor.core.replicas) == 2 and actor.core.replicas["b"].kv.num_blocks == 3)
        assert await ask(broker, submit()) == Accepted(replica_id="b", epoch=1)


async def test_peers_hear_of_every_dispatch():
    async with routing() as (broker, actor):
        heard = []
        peer = MemoryBus(broker)
        await peer.subscribe(
            subjects.router_peers(MODEL), lambda delivery: heard.append(unpack_booked(delivery.payload))
        )
        scheduler = Scheduler(broker, "a")
        await scheduler.start()
        await scheduler.report()
        await until(lambda: actor.core.replicas)
        await ask(broker, submit())
        await until(lambda: heard)
        assert (heard[0].router_id, heard[0].replica_id, heard[0].num_prefill_tokens) == ("r1", "a", 100)


async def test_unreadable_news_is_dropped():
    async with routing() as (broker, actor):
        await MemoryBus(broker).publish(subjects.replica_load(MODEL, "a"), b"\xc1")
        scheduler = Scheduler(broker, "b")
        await scheduler.report()
        await until(lambda: "b" in actor.core.replicas)
        assert list(actor.core.replicas) == ["b"]


async def test_a_draining_router_leaves_the_group():
    async with routing() as (broker, actor):
        await actor.drain(timeout_s=1)
        with pytest.raises(NoResponders):
            await ask(broker, submit())


async def test_a_full_inbox_is_answered_with_queue_full():
    async with routing(RouterConfig(instance="r1", max_inbox=10)) as (broker, _):
        answers = await asyncio.gather(*(ask(broker, submit(request_id=str(i))) for i in range(18)))
        codes = {answer.code for answer in answers}
        assert RejectCode.QUEUE_FULL in codes
        assert all(answer.retry_after_s is not None for answer in answers)
