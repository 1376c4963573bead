"""The smallest service, with ways to misbehave: `python -m tests.support.sample_service --start refuse`."""

import asyncio
import sys
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from shared.bus import Bus
from shared.config import ServiceConfig, StartupError
from shared.messages.cluster import ServiceState
from shared.service import Info, Service, main

ROLE = "sample"


class SampleConfig(ServiceConfig, frozen=True, kw_only=True):
    start: Annotated[Literal["fine", "refuse", "crash", "never"], Meta(description="How it starts.")] = "fine"
    work: Annotated[Literal["fine", "crash", "return"], Meta(description="How it works.")] = "fine"
    drain: Annotated[Literal["fine", "never"], Meta(description="How it drains.")] = "fine"


class SampleService(Service):
    role: ClassVar[str] = ROLE

    def __init__(self, config: SampleConfig, bus: Bus) -> None:
        self.instance = config.instance
        self.config = config
        self.bus = bus
        self.accepting = True

    async def run(self) -> None:
        if self.config.work == "crash":
            raise ValueError("the work is broken")
        if self.config.work == "fine":
            await asyncio.Event().wait()

    async def drain(self, timeout_s: float) -> None:
        if self.config.drain == "never":
            await asyncio.Event().wait()
        await self.bus.publish("sample.drained", str(timeout_s).encode())

    @property
    def state(self) -> ServiceState:
        return ServiceState.READY if self.accepting else ServiceState.DRAINING

    @property
    def epoch(self) -> int:
        return 7

    @property
    def info(self) -> Info:
        return {"kind": "sample"}

    @property
    def stats(self) -> Info:
        return {"num_requests": 3}

    def set_accepting(self, accepting: bool) -> bool:
        self.accepting = accepting
        return True


async def build(config: SampleConfig, bus: Bus) -> Service:
    match config.start:
        case "refuse":
            raise StartupError("port 80 is taken: choose another with --port")
        case "crash":
            raise ValueError("the start is broken")
        case "never":
            await asyncio.Event().wait()
    return SampleService(config, bus)


if __name__ == "__main__":
    sys.exit(main(ROLE, SampleConfig, build))
