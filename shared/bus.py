"""How services talk: publish, subscribe, request. `shared.nats_bus` implements it over NATS.

What a bus promises is what core NATS promises: a message arrives at most once, and messages of one publisher on one subject
arrive in order. Nothing is kept for a receiver that is not there, and nothing is sent again after a lost connection.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Delivery(NamedTuple):
    subject: str
    payload: bytes
    reply: str
    """Subject for the answer; "" when none is wanted."""


Callback = Callable[[Delivery], None]
"""Called in the event loop for each message: decode, append to an inbox, return. It must neither block nor raise."""


class BusError(Exception):
    """The message did not get through; each kind asks for a different next move."""


class PayloadTooLarge(BusError):
    """The sender's mistake: sending the same message again cannot help."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(f"message for {subject!r} has {size} bytes, the bus takes {limit}")
        self.size = size
        self.limit = limit


class NoResponders(BusError):
    """Nobody serves this subject at the moment: known at once, without waiting for a timeout."""


class RequestTimeout(BusError):
    """Somebody may have received the request, nobody answered in time."""


class BusDisconnected(BusError):
    """The bus is away (or went away before the answer came). It comes back by itself; see `Bus.on_connection_change`."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None:
        """Receive nothing further. Idempotent; works while disconnected too."""


class Bus(Protocol):
    @property
    def max_payload(self) -> int:
        """The largest payload in bytes that `publish` takes; room for headers is subtracted already."""

    @property
    def connected(self) -> bool: ...

    async def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        """Send and forget; waits only while the send buffer is full.

        Raises PayloadTooLarge, and BusDisconnected: then it was not sent, or the connection is stuck and nobody knows.
        """

    async def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> Subscription:
        """Call `callback` for each message, across reconnects; of the members of a `queue` group one gets each message.

        `subject` may hold `*` (one part) and end in `>` (the rest). On return it holds for all publishers; while
        disconnected it is noted, and holds as soon as the bus is back.
        """

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Send and wait for one answer.

        Raises PayloadTooLarge, NoResponders, RequestTimeout and BusDisconnected; after the last two the request may have
        been carried out.
        """

    def on_connection_change(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(connected)` at each change, from the event loop; a return means all subscriptions hold again."""

    async def close(self) -> None:
        """Send what is buffered and leave. Idempotent."""
