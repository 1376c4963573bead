"""`python -m services.gateway`: one gateway, or one more."""

import asyncio
import sys

import uvloop

from services.gateway.actor import GatewayActor, load_facts
from services.gateway.config import GatewayConfig
from shared.bus import Bus
from shared.service import main

CONFIG = GatewayConfig


async def build(config: GatewayConfig, bus: Bus) -> GatewayActor:
    facts, tool_parser = await asyncio.to_thread(load_facts, config)
    return GatewayActor(config, facts, tool_parser, bus)


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    sys.exit(main(GatewayActor.role, CONFIG, build))
