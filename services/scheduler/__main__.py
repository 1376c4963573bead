"""`python -m services.scheduler`: the scheduler of one replica, or a standby that claims the next free worker."""

import sys

import msgspec

from services.scheduler.actor import SchedulerActor
from services.scheduler.config import SchedulerConfig
from shared.bus import Bus
from shared.nats_bus import NatsBus
from shared.service import bus_config, main

CONFIG = SchedulerConfig
STEP_PENDING_BYTES = 64 * 1024


async def build(config: SchedulerConfig, bus: Bus) -> SchedulerActor:
    step_config = msgspec.structs.replace(bus_config(config), pending_size=STEP_PENDING_BYTES)
    step_bus = await NatsBus.connect(step_config, name=f"scheduler {config.instance} steps")
    return SchedulerActor(config, bus, step_bus)


if __name__ == "__main__":
    sys.exit(main(SchedulerActor.role, CONFIG, build))
