"""A bus inside one event loop that promises no more than NATS: what holds on it holds on the real one.

Messages arrive at most once. Those of one publisher on one subject arrive in order; between subjects or publishers the order
is drawn from the seed, also for one wildcard subscription.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from itertools import count

from shared.bus import BusDisconnected, Callback, Delivery, NoResponders, PayloadTooLarge, RequestTimeout

MAX_PAYLOAD = 8 * 1024 * 1024 - 1024
"""As of NatsBus with a server set to 8 MB."""

Lane = tuple["MemorySubscription", "MemoryBus", str]
"""Within (subscription, publisher, subject) order holds."""


def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to `pattern` gets messages on `subject`: `*` is one part, a last `>` is one or more."""
    wanted, parts = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(parts) <= len(wanted):
            return False
        parts = parts[: len(wanted)]
    return len(wanted) == len(parts) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True))


class MemorySubscription:
    def __init__(self, bus: "MemoryBus", subject: str, callback: Callback, queue: str) -> None:
        self.bus = bus
        self.subject = subject
        self.callback = callback
        self.queue = queue

    async def unsubscribe(self) -> None:
        self.bus.broker.subscriptions.pop(self, None)


class MemoryBroker:
    """What the buses of one test share; `seed` decides the order in which lanes are served."""

    def __init__(self, seed: int = 0, max_payload: int = MAX_PAYLOAD) -> None:
        self.max_payload = max_payload
        self.subscriptions: dict[MemorySubscription, None] = {}
        self.errors: list[Exception] = []
        """What callbacks raised; a real bus logs it."""
        self.inboxes = count()
        self._random = random.Random(seed)
        self._lanes: dict[Lane, deque[Delivery]] = {}

    def route(self, publisher: "MemoryBus", delivery: Delivery) -> bool:
        """Queue a message for all it concerns; False when that is nobody."""
        groups: dict[str, list[MemorySubscription]] = {}
        receivers = []
        for subscription in self.subscriptions:
            if subscription.bus.connected and matches(subscription.subject, delivery.subject):
                if subscription.queue:
                    groups.setdefault(subscription.queue, []).append(subscription)
                else:
                    receivers.append(subscription)
        receivers.extend(self._random.choice(members) for members in groups.values())
        for receiver in receivers:
            self._lanes.setdefault((receiver, publisher, delivery.subject), deque()).append(delivery)
            asyncio.get_running_loop().call_soon(self._deliver_one)
        return bool(receivers)

    def drop(self, bus: "MemoryBus") -> None:
        """Forget what is under way to a bus that lost its connection."""
        self._lanes = {lane: waiting for lane, waiting in self._lanes.items() if lane[0].bus is not bus}

    def _deliver_one(self) -> None:
        if not self._lanes:
            return  # dropped meanwhile
        lane = self._random.choice(list(self._lanes))
        delivery = self._lanes[lane].popleft()
        if not self._lanes[lane]:
            del self._lanes[lane]
        if lane[0] in self.subscriptions:
            try:
                lane[0].callback(delivery)
            except Exception as error:
                self.errors.append(error)


class MemoryBus:
    """One connection to a broker; several of them are several processes."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker if broker is not None else MemoryBroker()
        self._connected = True
        self._closed = False
        self._waiting: set[asyncio.Future[bytes]] = set()
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def max_payload(self) -> int:
        return self.broker.max_payload

    @property
    def connected(self) -> bool:
        return self._connected and not self._closed

    async def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        self._check(subject, payload)
        self.broker.route(self, Delivery(subject, payload, reply))

    async def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> MemorySubscription:
        subscription = MemorySubscription(self, subject, callback, queue)
        self.broker.subscriptions[subscription] = None
        return subscription

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        self._check(subject, payload)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def on_answer(delivery: Delivery) -> None:
            if not answer.done():
                answer.set_result(delivery.payload)

        reply = f"_INBOX.{next(self.broker.inboxes)}"
        inbox = await self.subscribe(reply, on_answer)
        self._waiting.add(answer)
        try:
            if not self.broker.route(self, Delivery(subject, payload, reply)):
                raise NoResponders(f"nobody answers on {subject!r}")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise RequestTimeout(f"no answer on {subject!r} within {timeout_s:g} s") from None
        finally:
            self._waiting.discard(answer)
            await inbox.unsubscribe()

    def on_connection_change(self, callback: Callable[[bool], None]) -> None:
        self._listeners.append(callback)

    async def close(self) -> None:
        self._closed = True
        self._lose()
        for subscription in [each for each in self.broker.subscriptions if each.bus is self]:
            await subscription.unsubscribe()

    def disconnect(self) -> None:
        """As when the broker dies: what is under way is lost, requests fail, subscriptions stay."""
        if not self._connected:
            return
        self._connected = False
        self._lose()
        self._announce()

    def reconnect(self) -> None:
        assert not self._closed, "a closed bus stays closed"
        if not self._connected:
            self._connected = True
            self._announce()

    def _lose(self) -> None:
        self.broker.drop(self)
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(BusDisconnected("the bus is away"))

    def _announce(self) -> None:
        for listener in self._listeners:
            listener(self._connected)

    def _check(self, subject: str, payload: bytes) -> None:
        if len(payload) > self.max_payload:
            raise PayloadTooLarge(subject, len(payload), self.max_payload)
        if not self.connected:
            raise BusDisconnected("the bus is away")
