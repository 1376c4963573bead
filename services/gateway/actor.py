"""The gateway as a service: listens, serves until told to stop, then lets running requests finish."""

import asyncio
from typing import ClassVar

from services.gateway.config import GatewayConfig
from services.gateway.errors import unavailable
from services.gateway.gateway import Gateway
from services.gateway.generation.splitting import REASONING_TAGS
from services.gateway.http.app import build_app
from services.gateway.http.server import HttpServer
from services.gateway.model_facts import ModelFacts, load_model_facts
from services.gateway.text.model_family import detect_family
from services.gateway.text.tool_parser import FORMAT_NAMES
from shared.bus import Bus
from shared.config import ConfigError
from shared.messages.cluster import ServiceState
from shared.service import Info, Service


class GatewayActor(Service):
    role: ClassVar[str] = "gateway"

    def __init__(self, config: GatewayConfig, facts: ModelFacts, tool_parser: str, bus: Bus) -> None:
        self.instance = config.instance
        self.gateway = Gateway(config, facts, bus)
        self.server = HttpServer(build_app(self.gateway, tool_parser), config)
        self._state = ServiceState.STARTING
        self.server.listen()

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def state(self) -> ServiceState:
        return self._state

    @property
    def info(self) -> Info:
        return {"host": self.gateway.config.host, "port": self.port}

    @property
    def stats(self) -> Info:
        return {"num_active_requests": self.gateway.num_active}

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            await self.gateway.mesh.start()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.gateway.mesh.outbox.run(), name="outbox")
                tasks.create_task(self.gateway.tick_forever(), name="tick")
                self._state = ServiceState.READY
                await self.server.serve()
                # The server has stopped after a drain: now only the end of the process is awaited.
                await asyncio.Event().wait()
        finally:
            self.server.close()

    async def drain(self, timeout_s: float) -> None:
        """Be not ready, refuse new requests, let running ones finish; cut off what still runs after `timeout_s`."""
        gateway = self.gateway
        gateway.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await gateway.until_idle()
        except TimeoutError:
            gateway.abort_all(unavailable("the gateway is shutting down", code="draining"))
            await gateway.until_idle()
        self.server.stop()
        # Aborts that were posted a moment ago must reach the bus before it is closed.
        await gateway.mesh.outbox.flush()


def load_facts(config: GatewayConfig) -> tuple[ModelFacts, str]:
    """The model's facts and the name of its tool call format. Raises StartupError."""
    facts = load_model_facts(config.model, config.model_path, use_generation_config=config.sampling_defaults == "model")
    tool_parser = config.tool_parser or detect_family(config.model_path)
    if tool_parser not in FORMAT_NAMES:
        raise ConfigError(f"tool_parser: {tool_parser!r} is not one of {', '.join(FORMAT_NAMES)}")
    if config.reasoning_parser and config.reasoning_parser not in REASONING_TAGS:
        raise ConfigError(f"reasoning_parser: {config.reasoning_parser!r} is not one of {', '.join(REASONING_TAGS)}")
    return facts, tool_parser
