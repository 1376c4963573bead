"""What every Bus promises: the same suite runs over memory and over a real NATS."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from shared.bus import Bus, BusDisconnected, Delivery, NoResponders, PayloadTooLarge, RequestTimeout
from shared.nats_bus import BusConfig, NatsBus
from tests.support.collector import PATIENCE_S, Collector
from tests.support.memory_bus import MemoryBroker, MemoryBus
from tests.support.nats import NatsServer


class Mesh(Protocol):
    """Where buses meet; its outage takes all of them away at once."""

    async def connect(self) -> Bus: ...
    def lose(self) -> None: ...
    def restore(self) -> None: ...
    async def close(self) -> None: ...


class MemoryMesh:
    def __init__(self) -> None:
        self._broker = MemoryBroker()
        self._buses: list[MemoryBus] = []

    async def connect(self) -> Bus:
        self._buses.append(MemoryBus(self._broker))
        return self._buses[-1]

    def lose(self) -> None:
        for bus in self._buses:
            bus.disconnect()

    def restore(self) -> None:
        for bus in self._buses:
            bus.reconnect()

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


class NatsMesh:
    def __init__(self) -> None:
        self._server = NatsServer()
        self._server.start()
        self._buses: list[NatsBus] = []

    async def connect(self) -> Bus:
        config = BusConfig(url=self._server.url, reconnect_wait_s=0.02)
        self._buses.append(await NatsBus.connect(config, name="test"))
        return self._buses[-1]

    def lose(self) -> None:
        self._server.kill()

    def restore(self) -> None:
        self._server.start()

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        self._server.close()


@pytest.fixture(params=[MemoryMesh, NatsMesh], ids=["memory", "nats"])
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    mesh: Mesh = request.param()
    yield mesh
    await mesh.close()


def answer_twice(bus: Bus, tasks: asyncio.TaskGroup) -> Collector:
    """A server that answers each request with its payload doubled."""

    class Server(Collector):
        def __call__(self, delivery: Delivery) -> None:
            super().__call__(delivery)
            tasks.create_task(bus.publish(delivery.reply, delivery.payload * 2))

    return Server()


class Connection:
    """Waits for changes of a bus's connection."""

    def __init__(self, bus: Bus) -> None:
        self.changes: asyncio.Queue[bool] = asyncio.Queue()
        bus.on_connection_change(self.changes.put_nowait)

    async def next_change(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            return await self.changes.get()


async def test_a_message_reaches_each_subscriber_as_it_was_sent(mesh: Mesh) -> None:
    sender, first, second = [await mesh.connect() for _ in range(3)]
    collectors = Collector(), Collector()
    await first.subscribe("a.b", collectors[0])
    await second.subscribe("a.b", collectors[1])
    await sender.publish("a.b", b"\x00payload", reply="answer.here")
    for collector in collectors:
        assert await collector.until(1) == [Delivery("a.b", b"\x00payload", "answer.here")]


async def test_a_sender_hears_itself(mesh: Mesh) -> None:
    bus = await mesh.connect()
    collector = Collector()
    await bus.subscribe("a", collector)
    await bus.publish("a", b"")
    assert await collector.until(1) == [Delivery("a", b"", "")]


async def test_wildcards_match_one_part_or_the_rest(mesh: Mesh) -> None:
    bus = await mesh.connect()
    one, rest, everything = Collector(), Collector(), Collector()
    await bus.subscribe("rm.*.load", one)
    await bus.subscribe("rm.x.>", rest)
    await bus.subscribe("rm.>", everything)
    subjects = ["rm.x.load", "rm.y.load", "rm.x.kv.snapshot", "rm.x"]
    for subject in subjects:
        await bus.publish(subject, b"")
    await everything.until(len(subjects))
    assert {delivery.subject for delivery in one.deliveries} == {"rm.x.load", "rm.y.load"}
    assert {delivery.subject for delivery in rest.deliveries} == {"rm.x.load", "rm.x.kv.snapshot"}


async def test_messages_of_one_publisher_on_one_subject_arrive_in_order(mesh: Mesh) -> None:
    sender, receiver = await mesh.connect(), await mesh.connect()
    collector = Collector()
    await receiver.subscribe("ordered.*", collector)
    for number in range(300):
        await sender.publish(f"ordered.{number % 2}", number.to_bytes(2))
    await collector.until(300)
    for subject in ("ordered.0", "ordered.1"):
        payloads = [delivery.payload for delivery in collector.deliveries if delivery.subject == subject]
        assert payloads == sorted(payloads)
        assert len(payloads) == 150


async def test_one_member_of_a_queue_group_gets_each_message_and_other_subscribers_too(mesh: Mesh) -> None:
    sender, receiver = await mesh.connect(), await mesh.connect()
    group, outsider = Collector(), Collector()
    for _ in range(3):
        await receiver.subscribe("work", group, queue="workers")
    await receiver.subscribe("work", outsider)
    for number in range(60):
        await sender.publish("work", bytes([number]))
    await asyncio.gather(group.until(60), outsider.until(60))
    assert sorted(group.payloads) == sorted(outsider.payloads) == [bytes([number]) for number in range(60)]


async def test_a_request_gets_its_own_answer(mesh: Mesh) -> None:
    client, server = await mesh.connect(), await mesh.connect()
    async with asyncio.TaskGroup() as tasks:
        await server.subscribe("double", answer_twice(server, tasks))
        answers = await asyncio.gather(*(client.request("double", bytes([n]), timeout_s=PATIENCE_S) for n in range(50)))
    assert answers == [bytes([n, n]) for n in range(50)]


async def test_a_request_nobody_serves_is_known_at_once(mesh: Mesh) -> None:
    bus = await mesh.connect()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(NoResponders, match=r"nobody\.there"):
            await bus.request("nobody.there", b"", timeout_s=1000)


async def test_a_request_nobody_answers_ends_at_its_timeout(mesh: Mesh) -> None:
    bus = await mesh.connect()
    await bus.subscribe("silent", Collector())
    with pytest.raises(RequestTimeout, match=r"silent.*0\.05 s"):
        await bus.request("silent", b"", timeout_s=0.05)


async def test_a_payload_up_to_the_limit_passes_and_one_byte_more_is_refused_by_the_sender(mesh: Mesh) -> None:
    bus = await mesh.connect()
    collector = Collector()
    await bus.subscribe("big", collector)
    for send in (
        bus.publish("big", bytes(bus.max_payload + 1)),
        bus.request("big", bytes(bus.max_payload + 1), timeout_s=1),
    ):
        with pytest.raises(PayloadTooLarge) as refused:
            await send
        assert (refused.value.size, refused.value.limit) == (bus.max_payload + 1, bus.max_payload)
    await bus.publish("big", bytes(bus.max_payload))
    assert [len(delivery.payload) for delivery in await collector.until(1)] == [bus.max_payload]
    assert bus.connected


async def test_an_unsubscribed_callback_hears_nothing_more(mesh: Mesh) -> None:
    bus = await mesh.connect()
    gone, staying = Collector(), Collector()
    subscription = await bus.subscribe("a", gone)
    await bus.subscribe("a", staying)
    await bus.publish("a", b"1")
    await asyncio.gather(gone.until(1), staying.until(1))
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await bus.publish("a", b"2")
    await staying.until(2)
    assert gone.payloads == [b"1"]


async def test_a_callback_that_raises_does_not_end_its_subscription(mesh: Mesh) -> None:
    bus = await mesh.connect()

    class Picky(Collector):
        def __call__(self, delivery: Delivery) -> None:
            if delivery.payload == b"bad":
                raise ValueError("cannot read this")
            super().__call__(delivery)

    collector = Picky()
    await bus.subscribe("a", collector)
    await bus.publish("a", b"bad")
    await bus.publish("a", b"good")
    assert [delivery.payload for delivery in await collector.until(1)] == [b"good"]


async def test_a_closed_bus_takes_nothing(mesh: Mesh) -> None:
    bus = await mesh.connect()
    await bus.close()
    await bus.close()
    assert not bus.connected
    with pytest.raises(BusDisconnected):
        await bus.publish("a", b"")
    with pytest.raises(BusDisconnected):
        await bus.request("a", b"", timeout_s=1)


async def test_an_outage_is_announced_and_fails_requests_at_once(mesh: Mesh) -> None:
    bus = await mesh.connect()
    connection = Connection(bus)
    waiting = Collector()
    await bus.subscribe("silent", waiting)
    request = asyncio.create_task(bus.request("silent", b"", timeout_s=1000))
    await waiting.until(1)
    mesh.lose()
    assert await connection.next_change() is False
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BusDisconnected):
            await request
    assert not bus.connected
    with pytest.raises(BusDisconnected):
        await bus.publish("silent", b"")
    mesh.restore()
    assert await connection.next_change() is True
    assert bus.connected


async def test_after_an_outage_all_subscriptions_hold_and_nothing_old_is_sent(mesh: Mesh) -> None:
    sender, receiver = await mesh.connect(), await mesh.connect()
    connections = Connection(sender), Connection(receiver)
    before, during, dropped = Collector(), Collector(), Collector()
    await receiver.subscribe("a", before)
    leaving = await receiver.subscribe("a", dropped)
    mesh.lose()
    assert [await connection.next_change() for connection in connections] == [False, False]
    with pytest.raises(BusDisconnected):
        await sender.publish("a", b"old")
    await receiver.subscribe("a", during)
    await leaving.unsubscribe()
    mesh.restore()
    assert [await connection.next_change() for connection in connections] == [True, True]
    await sender.publish("a", b"new")
    await asyncio.gather(before.until(1), during.until(1))
    assert before.payloads == during.payloads == [b"new"]
    assert dropped.payloads == []
