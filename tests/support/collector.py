"""Waiting for messages in tests, without sleeping."""

import asyncio

from shared.bus import Delivery

PATIENCE_S = 30.0
"""How long a test waits for what must happen; only a failing test waits that long."""


class Collector:
    """A bus callback that keeps what comes."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self._arrived = asyncio.Event()

    def __call__(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        self._arrived.set()

    @property
    def payloads(self) -> list[bytes]:
        return [delivery.payload for delivery in self.deliveries]

    async def until(self, num_messages: int) -> list[Delivery]:
        """Wait for so many messages in all. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.deliveries) < num_messages:
                self._arrived.clear()
                await self._arrived.wait()
        return self.deliveries
