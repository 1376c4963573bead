"""What only a real NATS can do to us: protocol errors, silence, full buffers, several servers."""

import asyncio
from typing import Any

import pytest

from shared.bus import BusDisconnected, Delivery
from shared.nats_bus import BusConfig, NatsBus
from tests.support.collector import PATIENCE_S, Collector
from tests.support.nats import NatsServer


async def connect(server: NatsServer, **settings: Any) -> NatsBus:
    return await NatsBus.connect(BusConfig(url=server.url, reconnect_wait_s=0.02, **settings), name="test")


async def changes(bus: NatsBus, *expected: bool) -> None:
    """Wait until the connection has changed like this."""
    seen: asyncio.Queue[bool] = asyncio.Queue()
    bus.on_connection_change(seen.put_nowait)
    async with asyncio.timeout(PATIENCE_S):
        assert tuple([await seen.get() for _ in expected]) == expected


async def test_an_unreachable_server_is_one_line_with_its_address_and_without_the_password() -> None:
    with pytest.raises(BusDisconnected) as error:
        await NatsBus.connect(BusConfig(url="nats://user:secret@127.0.0.1:1", connect_timeout_s=0.3), name="test")
    message = str(error.value)
    assert "nats://127.0.0.1:1 is not reachable within 0.3 s" in message
    assert "Connect call failed" in message
    assert "secret" not in message
    assert "\n" not in message


async def test_a_maximum_payload_violation_rebuilds_the_connection_with_its_subscriptions(
    nats_server: NatsServer,
) -> None:
    bus = await connect(nats_server)
    collector = Collector()
    await bus.subscribe("violation", collector)
    changed = asyncio.create_task(changes(bus, False, True))
    await asyncio.sleep(0)
    too_large = bytes(bus._client.max_payload + 1)
    await bus._client._send_publish(
        "violation", "", too_large, len(too_large), None
    )  # past our own check and nats-py's
    await changed
    await bus.publish("violation", b"fine again")
    assert (await collector.until(1))[0].payload == b"fine again"
    await bus.close()


async def test_a_connection_survives_many_restarts(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server)
    collector = Collector()
    await bus.subscribe("a", collector)
    for number in range(5):
        changed = asyncio.create_task(changes(bus, False, True))
        await asyncio.sleep(0)
        own_nats_server.kill()
        own_nats_server.start()
        await changed
        await bus.publish("a", bytes([number]))
        assert (await collector.until(number + 1))[-1].payload == bytes([number])
    await bus.close()


async def test_messages_on_their_way_when_the_server_dies_are_never_sent_again(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server)
    collector = Collector()
    await bus.subscribe("step", collector)
    changed = asyncio.create_task(changes(bus, False, True))
    await asyncio.sleep(0)
    own_nats_server.kill()
    for _ in range(10):  # the client has not noticed yet, or refuses
        try:
            await bus.publish("step", b"stale")
        except BusDisconnected:
            break
    own_nats_server.start()
    await changed
    await bus.publish("step", b"fresh")
    assert [delivery.payload for delivery in await collector.until(1)] == [b"fresh"]
    await bus.close()


async def test_a_server_that_falls_silent_is_noticed_by_its_missing_pongs(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server, ping_interval_s=0.05)
    noticed = asyncio.create_task(changes(bus, False))
    await asyncio.sleep(0)
    own_nats_server.pause()
    await noticed
    back = asyncio.create_task(changes(bus, True))
    await asyncio.sleep(0)
    own_nats_server.resume()
    await back
    await bus.close()


async def test_publish_says_when_the_server_no_longer_reads_and_the_buffer_is_full(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server, pending_size=64 * 1024, flush_timeout_s=0.05)
    own_nats_server.pause()
    with pytest.raises(BusDisconnected, match="the buffer takes 65536"):
        for _ in range(1000):  # the buffers of the system come first
            await bus.publish("bulk", bytes(1024 * 1024))
    own_nats_server.resume()
    await bus.close()


async def test_a_publisher_that_waits_for_a_full_buffer_can_be_cancelled(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server, pending_size=64 * 1024, flush_timeout_s=1000)

    async def publish_forever() -> None:
        while True:
            await bus.publish("bulk", bytes(1024 * 1024))

    own_nats_server.pause()
    publishing = asyncio.create_task(publish_forever())
    before = -1
    while before < (before := bus._client.stats["out_msgs"]):  # noqa: ASYNC110  # stuck when nothing goes out
        await asyncio.sleep(0.1)
    publishing.cancel()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(asyncio.CancelledError):
            await publishing
    own_nats_server.resume()
    await bus.close()


async def test_a_subscription_given_up_while_the_server_is_silent_leaves_the_others_alone(
    own_nats_server: NatsServer,
) -> None:
    bus = await connect(own_nats_server)
    collector = Collector()
    await bus.subscribe("a", collector)
    own_nats_server.pause()
    given_up = asyncio.create_task(bus.subscribe("b", collector))
    await asyncio.sleep(0.05)  # its PING is on the way
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    own_nats_server.resume()
    changed = asyncio.create_task(changes(bus, False))
    await bus.publish("a", b"still heard")
    assert (await collector.until(1))[0].payload == b"still heard"
    assert not changed.done()
    changed.cancel()
    await bus.close()


async def test_closing_does_not_wait_for_a_server_that_no_longer_reads(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server, flush_timeout_s=0.05)
    own_nats_server.pause()
    with pytest.raises(BusDisconnected):
        for _ in range(1000):
            await bus.publish("bulk", bytes(1024 * 1024))
    async with asyncio.timeout(PATIENCE_S):
        await bus.close()
    own_nats_server.resume()


async def test_of_several_servers_one_that_lives_is_enough(
    nats_server: NatsServer, own_nats_server: NatsServer
) -> None:
    config = BusConfig(url=f"{own_nats_server.url}, {nats_server.url}", reconnect_wait_s=0.02)
    own_nats_server.kill()
    bus = await NatsBus.connect(config, name="test")
    collector = Collector()
    await bus.subscribe("one.of.two", collector)
    await bus.publish("one.of.two", b"here")
    assert (await collector.until(1))[0].payload == b"here"
    await bus.close()


async def test_what_was_published_before_close_arrives(nats_server: NatsServer) -> None:
    receiver, sender = await connect(nats_server), await connect(nats_server)
    collector = Collector()
    await receiver.subscribe("goodbye", collector)
    await sender.publish("goodbye", bytes(4 * 1024 * 1024))
    await sender.publish("goodbye", b"last")
    await sender.close()
    assert (await collector.until(2))[-1] == Delivery("goodbye", b"last", "")
    await receiver.close()


async def test_a_subscription_made_while_the_supervisor_reconnects_is_not_forgotten(
    own_nats_server: NatsServer,
) -> None:
    bus = await connect(own_nats_server)
    collectors = [Collector() for _ in range(20)]
    changed = asyncio.create_task(changes(bus, False, True))
    await asyncio.sleep(0)
    own_nats_server.kill()
    own_nats_server.start()
    for number, collector in enumerate(collectors):  # before, while and after the connection comes back
        await bus.subscribe(f"late.{number}", collector)
    await changed
    for number, collector in enumerate(collectors):
        await bus.publish(f"late.{number}", b"")
        assert len(await collector.until(1)) == 1
    await bus.close()
