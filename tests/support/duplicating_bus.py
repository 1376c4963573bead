"""An unreliable network: what passes between gateways, schedulers and workers arrives again, at once and once more late."""

import asyncio
import threading

from nats.aio.client import Client
from nats.aio.msg import Msg

DUPLICATED = ("replica.*.requests", "replica.*.steps", "replica.*.results", "gateway.*.frames")
"""Subjects below the model's prefix, as `shared.subjects` spells them."""
LATE_S = 0.2
"""A few steps later: behind messages that were sent after the original."""
START_TIMEOUT_S = 10.0


class DuplicatingBus:
    """While started, publishes everything on `DUPLICATED` twice again, under a connection that does not hear itself."""

    def __init__(self, nats_url: str, model: str) -> None:
        self.num_duplicated = 0
        self._nats_url = nats_url
        self._model = model
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="duplicating bus", daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def start(self) -> None:
        """Return when duplicates flow. Raises TimeoutError."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError(f"NATS did not let us subscribe within {START_TIMEOUT_S:g} s")

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_TIMEOUT_S)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        client = Client()
        await client.connect(self._nats_url, no_echo=True)

        async def duplicate(message: Msg) -> None:
            self.num_duplicated += 1
            await client.publish(message.subject, message.data, reply=message.reply)
            self._loop.call_later(
                LATE_S,
                lambda: asyncio.ensure_future(client.publish(message.subject, message.data, reply=message.reply)),
            )

        for subject in DUPLICATED:
            await client.subscribe(f"rm.{self._model}.{subject}", cb=duplicate)
        await client.flush()
        self._started.set()
        await self._stop.wait()
        await asyncio.sleep(2 * LATE_S)  # the late copies that are due go out before the connection is closed
        await client.close()
