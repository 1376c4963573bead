"""`python -m shared.probe --instance NAME`: is this service alive and on the bus? For the health checks of containers.

Exit code 0 when a heartbeat of the instance arrives in time, whatever its state: a standby that waits for its turn is well.
"""

import asyncio
import os
import sys

from shared import subjects
from shared.bus import BusDisconnected, Delivery
from shared.config import ServiceConfig, StartupError, load_config
from shared.messages.cluster import Heartbeat, unpack_heartbeat
from shared.nats_bus import BusConfig, NatsBus
from shared.service import HEARTBEAT_S

_CONNECT_TIMEOUT_S = 2.0
_PATIENCE_S = 4 * HEARTBEAT_S


async def probe(config: ServiceConfig) -> Heartbeat:
    """The next heartbeat of `config.instance`. Raises BusDisconnected without a bus, TimeoutError in silence."""
    heard: asyncio.Future[Heartbeat] = asyncio.get_running_loop().create_future()

    def on_heartbeat(delivery: Delivery) -> None:
        if not heard.done():
            heard.set_result(unpack_heartbeat(delivery.payload))

    bus = await NatsBus.connect(BusConfig(url=config.nats_url, connect_timeout_s=_CONNECT_TIMEOUT_S), name="probe")
    try:
        await bus.subscribe(subjects.heartbeat(config.model, instance=config.instance), on_heartbeat)
        async with asyncio.timeout(_PATIENCE_S):
            return await heard
    finally:
        await bus.close()


def main() -> int:
    try:
        config = load_config(ServiceConfig, "probe", sys.argv[1:], os.environ)
        if not config.instance:
            raise StartupError("--instance names the service to look for")
        heartbeat = asyncio.run(probe(config))
    except (StartupError, BusDisconnected) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except TimeoutError:
        print(f"error: no heartbeat of {config.instance!r} within {_PATIENCE_S:g} s", file=sys.stderr)
        return 1
    print(f"{heartbeat.role} {heartbeat.instance}: {heartbeat.state}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
