import asyncio
import contextlib
import threading

import msgspec
import pytest

from services.worker.actor import WorkerActor
from services.worker.config import WorkerConfig
from services.worker.engine import Engine
from services.worker.matching.matchers import Matchers
from services.worker.opening import open_engine
from services.worker.runner import ModelLimits, Sampled
from shared import subjects
from shared.bus import BusDisconnected, NoResponders
from shared.config import StartupError
from shared.messages.cluster import Heartbeat, ServiceState
from shared.messages.execution import (
    Claim,
    Lapsed,
    Lease,
    Refused,
    Resend,
    RowEnd,
    unpack_claim_reply,
    unpack_worker_outbox,
)
from shared.messages.packing import pack
from tests.support.memory_bus import MemoryBroker, MemoryBus
from tests.support.worker_engine import no_tokenizer
from tests.support.worker_steps import Row, new_sequence, rows, step

MODEL = "test-model"
CLAIM = Claim(replica_id="r1", scheduler_instance="anna")
TIMEOUT_S = 10


def config(**settings):
    settings = {"model_kind": "simulated", "simulated_step_ms": 0, "instance": "w1", **settings}
    return WorkerConfig(model=MODEL, **settings)


class SchedulerSide:
    """What a scheduler sees of a worker: claims and steps out, results in."""

    def __init__(self, bus):
        self.bus = bus
        self.inbox = asyncio.Queue()

    async def listen(self, replica_id="r1"):
        await self.bus.subscribe(subjects.replica_results(MODEL, replica_id), self._take)

    def _take(self, delivery):
        self.inbox.put_nowait(unpack_worker_outbox(delivery.payload))

    async def claim(self, claim=CLAIM, group="w1"):
        """Retried until the worker has loaded and listens."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    reply = await self.bus.request(
                        subjects.worker_claim(MODEL, group), pack(claim), timeout_s=TIMEOUT_S
                    )
                except NoResponders:
                    await asyncio.sleep(0)
                else:
                    return unpack_claim_reply(reply)

    async def send(self, message, replica_id="r1"):
        await self.bus.publish(subjects.replica_steps(MODEL, replica_id), pack(message))

    async def receive(self):
        async with asyncio.timeout(TIMEOUT_S):
            return await self.inbox.get()


@contextlib.asynccontextmanager
async def running(actor):
    task = asyncio.create_task(actor.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def broker():
    return MemoryBroker(seed=1)


@pytest.fixture
async def scheduler(broker):
    side = SchedulerSide(MemoryBus(broker))
    await side.listen()
    return side


@pytest.fixture
async def worker(broker):
    settings = config()
    actor = WorkerActor(settings, MemoryBus(broker), lambda: open_engine(settings))
    async with running(actor):
        yield actor


def admit(seq, epoch, handle=1, **kwargs):
    return step(seq, epoch=epoch, admit=[new_sequence(handle, [5, 6], **kwargs)], extend=[(handle, 2)])


async def test_a_claim_is_answered_with_a_lease_and_steps_with_results(worker, scheduler):
    lease = await scheduler.claim()
    assert isinstance(lease, Lease)
    assert (lease.group, lease.ttl_ms, lease.vocab_size) == ("w1", 3000, 49152)
    assert worker.epoch == lease.epoch
    assert worker.info["free"] == 0
    await scheduler.send(admit(1, lease.epoch))
    await scheduler.send(step(2, epoch=lease.epoch, decode=[1]))
    results = [await scheduler.receive() for _ in range(2)]
    assert [(result.epoch, result.seq) for result in results] == [(lease.epoch, 1), (lease.epoch, 2)]
    assert all(len(rows(result)[0].tokens) == 1 for result in results)
    assert worker.stats["num_steps"] == 2


async def test_while_the_model_loads_the_worker_is_starting_and_hears_no_claim(broker, scheduler):
    loaded = threading.Event()

    def open_slowly():
        assert loaded.wait(TIMEOUT_S)
        return open_engine(config())

    actor = WorkerActor(config(), MemoryBus(broker), open_slowly)
    async with running(actor):
        await asyncio.sleep(0)
        assert actor.state is ServiceState.STARTING
        assert actor.info["free"] == 0
        with pytest.raises(NoResponders):
            await scheduler.bus.request(subjects.worker_claim(MODEL, "w1"), pack(CLAIM), timeout_s=1)
        loaded.set()
        assert isinstance(await scheduler.claim(), Lease)
        assert actor.state is ServiceState.READY


async def test_another_scheduler_is_refused_while_the_lease_lives(worker, scheduler):
    await scheduler.claim()
    reply = await scheduler.claim(Claim(replica_id="r2", scheduler_instance="berta"))
    assert reply == Refused(reason="leased to 'anna'")


async def test_a_new_lease_starts_with_nothing_and_old_steps_do_not_count(worker, scheduler):
    old = await scheduler.claim()
    await scheduler.send(admit(1, old.epoch))
    await scheduler.receive()
    new = await scheduler.claim()
    assert new.epoch > old.epoch
    await scheduler.send(step(2, epoch=old.epoch, decode=[1]))
    await scheduler.send(admit(1, new.epoch))
    result = await scheduler.receive()
    assert (result.epoch, [row.end for row in rows(result)]) == (new.epoch, [RowEnd.RUNNING])


async def test_a_worker_that_was_replaced_says_nothing_to_the_steps_of_its_successor(worker, scheduler):
    lease = await scheduler.claim()
    await scheduler.send(admit(1, lease.epoch + 1))
    await scheduler.send(Resend(epoch=lease.epoch + 1, seq=1))
    await scheduler.send(admit(1, lease.epoch))
    assert (await scheduler.receive()).epoch == lease.epoch
    assert scheduler.inbox.empty()


async def test_a_repeated_step_is_answered_with_the_result_it_had(worker, scheduler):
    lease = await scheduler.claim()
    await scheduler.send(admit(1, lease.epoch))
    first = await scheduler.receive()
    await scheduler.send(admit(1, lease.epoch))
    assert await scheduler.receive() == first
    await scheduler.send(step(2, epoch=lease.epoch, decode=[1]))
    second = await scheduler.receive()
    await scheduler.send(Resend(epoch=lease.epoch, seq=1))
    assert [await scheduler.receive(), await scheduler.receive()] == [first, second]


async def test_results_older_than_the_last_two_end_the_lease(worker, scheduler):
    lease = await scheduler.claim()
    await scheduler.send(admit(1, lease.epoch))
    for seq in (2, 3):
        await scheduler.send(step(seq, epoch=lease.epoch, decode=[1]))
    for _ in range(3):
        await scheduler.receive()
    await scheduler.send(Resend(epoch=lease.epoch, seq=1))
    lapsed = await scheduler.receive()
    assert lapsed == Lapsed(epoch=lease.epoch, seq=4, reason="the result of step 1 is no longer kept")
    assert worker.info["free"] == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (lambda epoch: step(2, epoch=epoch), "step 1 is missing"),
        (
            lambda epoch: step(1, epoch=epoch, decode=[9]),
            "step 1 makes no sense: a row names handle 9, which is unknown",
        ),
    ],
)
async def test_a_missing_step_or_one_without_sense_ends_the_lease(worker, scheduler, message, reason):
    lease = await scheduler.claim()
    await scheduler.send(message(lease.epoch))
    lapsed = await scheduler.receive()
    assert isinstance(lapsed, Lapsed)
    assert lapsed.reason == reason
    assert isinstance(await scheduler.claim(Claim(replica_id="r1", scheduler_instance="berta")), Lease)


async def test_an_unreadable_step_ends_the_lease(worker, scheduler):
    await scheduler.claim()
    await scheduler.bus.publish(subjects.replica_steps(MODEL, "r1"), b"\x99")
    assert "cannot be read" in (await scheduler.receive()).reason


async def test_more_steps_than_fit_the_queue_end_the_lease(broker, scheduler):
    settings = config(simulated_step_ms=50)
    actor = WorkerActor(settings, MemoryBus(broker), lambda: open_engine(settings))
    async with running(actor):
        lease = await scheduler.claim()
        await scheduler.send(admit(1, lease.epoch))
        for seq in range(2, 30):
            await scheduler.send(step(seq, epoch=lease.epoch, decode=[1]))
        while not isinstance(message := await scheduler.receive(), Lapsed):
            pass
        assert message.reason == "more steps were sent than the window allows"


@pytest.mark.parametrize("silence", ["no heartbeat", "heartbeats of a scheduler that leads another worker"])
async def test_a_silent_scheduler_loses_its_lease_and_a_heartbeat_keeps_it(broker, scheduler, silence):
    settings = config(lease_ttl_s=0.6)
    actor = WorkerActor(settings, MemoryBus(broker), lambda: open_engine(settings))
    async with running(actor):
        lease = await scheduler.claim()
        heartbeat = Heartbeat(role="scheduler", instance="anna", state=ServiceState.READY, epoch=lease.epoch)
        beat = pack(heartbeat)
        for _ in range(8):
            await asyncio.sleep(0.1)
            await scheduler.bus.publish(subjects.heartbeat(MODEL, "scheduler", "anna"), beat)
        assert actor.epoch == lease.epoch
        if silence != "no heartbeat":
            beat = pack(msgspec.structs.replace(heartbeat, epoch=lease.epoch + 1))
            for _ in range(7):
                await asyncio.sleep(0.1)
                await scheduler.bus.publish(subjects.heartbeat(MODEL, "scheduler", "anna"), beat)
        lapsed = await scheduler.receive()
        assert lapsed.reason == "nothing heard of the scheduler for 0.6 s"
        assert actor.info["free"] == 1


async def test_results_are_held_while_the_bus_is_away_and_sent_when_it_is_back(broker, scheduler):
    sampled, may_go = threading.Event(), threading.Event()

    class HeldRunner:
        limits = ModelLimits(num_slots=1000, context_len=100, vocab_size=100, end_token_ids=(1,))

        def run(self, plan):
            sampled.set()
            assert may_go.wait(TIMEOUT_S)
            return Sampled({0: [7]})

    class WatchedBus(MemoryBus):
        refused = asyncio.Event()

        async def publish(self, subject, payload, *, reply=""):
            try:
                await super().publish(subject, payload, reply=reply)
            except BusDisconnected:
                self.refused.set()
                raise

    bus = WatchedBus(broker)
    actor = WorkerActor(config(), bus, lambda: Engine(HeldRunner(), Matchers(no_tokenizer, 100)))
    async with running(actor):
        lease = await scheduler.claim()
        await scheduler.send(admit(1, lease.epoch, extents=[(0, 10)]))
        await asyncio.to_thread(sampled.wait, TIMEOUT_S)
        bus.disconnect()
        may_go.set()
        await bus.refused.wait()
        assert scheduler.inbox.empty()
        bus.reconnect()
        assert rows(await scheduler.receive()) == [Row([7], RowEnd.RUNNING)]


async def test_a_draining_worker_refuses_claims_and_gives_its_lease_back_once_it_is_quiet(worker, scheduler):
    lease = await scheduler.claim()
    draining = asyncio.create_task(worker.drain(timeout_s=TIMEOUT_S))
    await asyncio.sleep(0)
    assert worker.state is ServiceState.DRAINING
    assert await scheduler.claim() == Refused(reason="draining")
    await scheduler.send(admit(1, lease.epoch))
    assert rows(await scheduler.receive())[0].end is RowEnd.RUNNING
    await draining
    lapsed = Lapsed(epoch=lease.epoch, seq=2, reason="the worker shuts down", is_handover=True)
    assert await scheduler.receive() == lapsed


async def test_a_crash_of_the_executor_ends_the_worker(broker):
    def fail():
        raise StartupError("model_path is not set")

    actor = WorkerActor(config(), MemoryBus(broker), fail)
    with pytest.RaisesGroup(pytest.RaisesExc(StartupError, match="model_path is not set")):
        async with asyncio.timeout(TIMEOUT_S):
            await actor.run()


async def test_an_unreadable_claim_is_ignored(worker, scheduler):
    await scheduler.claim()
    await scheduler.bus.publish(subjects.worker_claim(MODEL, "w1"), msgspec.msgpack.encode({"type": "nonsense"}))
    assert isinstance(await scheduler.claim(), Lease)
