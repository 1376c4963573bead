"""`python -m services.worker`: one worker group with one rank."""

import sys
from functools import partial

from services.worker.actor import WorkerActor
from services.worker.config import WorkerConfig
from services.worker.opening import open_engine
from shared.bus import Bus
from shared.service import main

CONFIG = WorkerConfig

SWITCH_INTERVAL_S = 0.0005
"""How long the event loop's thread may keep the executor's waiting for the interpreter; Python's default is 5 ms."""


async def build(config: WorkerConfig, bus: Bus) -> WorkerActor:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return WorkerActor(config, bus, partial(open_engine, config))


if __name__ == "__main__":
    sys.exit(main(WorkerActor.role, CONFIG, build))
