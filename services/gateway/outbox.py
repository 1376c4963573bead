"""Messages that nobody waits for an answer to (Abort, Finish, Resync): posted from anywhere, sent in order by one task."""

import asyncio

from shared.bus import Bus, BusDisconnected
from shared.inbox import Inbox
from shared.telemetry import get_logger

log = get_logger(__name__)

RETRY_S = 0.05
MAX_MESSAGES = 65536
"""Far more than there are requests: reached only if the bus stays away while every client leaves."""


class Outbox:
    """What is posted while the bus is away is sent when it is back, so that an abort is never lost to an outage."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._connected = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._queue: Inbox[tuple[str, bytes]] = Inbox(MAX_MESSAGES)
        bus.on_connection_change(self._on_connection)
        self._on_connection(bus.connected)

    def post(self, subject: str, payload: bytes) -> None:
        if self._queue.append((subject, payload)):
            self._idle.clear()
        else:
            log.error("outbox is full, message dropped", subject=subject, max_messages=MAX_MESSAGES)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            for subject, payload in await self._queue.take_ready():
                await self._send(subject, payload)
            if not len(self._queue):
                self._idle.set()

    async def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until everything posted is sent; not longer than `timeout_s`, for the bus may be away."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("messages left unsent", num_messages=len(self._queue))

    async def _send(self, subject: str, payload: bytes) -> None:
        while True:
            await self._connected.wait()
            try:
                await self._bus.publish(subject, payload)
            except BusDisconnected:
                self._on_connection(self._bus.connected)
                await asyncio.sleep(RETRY_S)  # the bus may not have noticed yet
            else:
                return

    def _on_connection(self, connected: bool) -> None:
        if connected:
            self._connected.set()
        else:
            self._connected.clear()
