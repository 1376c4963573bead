"""The health check of a container: alive means that heartbeats arrive."""

import asyncio

import pytest

from shared import subjects
from shared.config import ServiceConfig
from shared.messages.cluster import Heartbeat, ServiceState
from shared.messages.packing import pack
from shared.nats_bus import BusConfig, NatsBus
from shared.probe import probe


async def test_a_service_whose_heartbeats_arrive_is_alive_in_any_state(nats_server):
    config = ServiceConfig(model="probed.v1", nats_url=nats_server.url, instance="worker-1")
    bus = await NatsBus.connect(BusConfig(url=nats_server.url), name="test")
    heartbeat = Heartbeat(role="worker", instance="worker-1", state=ServiceState.STARTING)

    async def beat() -> None:
        while True:
            await bus.publish(subjects.heartbeat("probed.v1", "worker", "worker-1"), pack(heartbeat))
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat())
    assert await probe(config) == heartbeat
    beating.cancel()
    await bus.close()


async def test_silence_is_no_life(nats_server):
    with pytest.raises(TimeoutError):
        await probe(ServiceConfig(model="probed.v2", nats_url=nats_server.url, instance="worker-1"))
