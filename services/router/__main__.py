"""`python -m services.router`: one router, or one more."""

import sys

from services.router.actor import RouterActor
from services.router.config import RouterConfig
from shared.bus import Bus
from shared.service import main

CONFIG = RouterConfig


async def build(config: RouterConfig, bus: Bus) -> RouterActor:
    return RouterActor(config, bus)


if __name__ == "__main__":
    sys.exit(main(RouterActor.role, CONFIG, build))
