"""The bus over NATS.

nats-py's own reconnect is switched off: a supervisor replaces the whole client whenever it is gone. One path then serves
every way to lose a connection, and what that path promises is exact:

* a protocol error such as a Maximum Payload Violation closes a nats-py client for good, so replacing it is needed anyway;
* a reconnecting nats-py client replays what it still buffers, so a step could be run long after its time; a new client starts
  empty;
* when a client closes with bytes still buffered, writing them to the dead socket can raise before `closed_cb` is called, so
  the supervisor also looks by itself (`_CHECK_S`).

The supervisor never gives up, with short jittered waits, and a new client has every subscription before anyone hears of it.
"""

import asyncio
import contextlib
import random
import re
from collections.abc import Callable
from contextvars import copy_context
from typing import Annotated

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription
from nats.aio.transport import TcpTransport

from shared.bus import BusDisconnected, Callback, Delivery, NoResponders, PayloadTooLarge, RequestTimeout
from shared.telemetry import get_logger

log = get_logger(__name__)

_HEADER_MARGIN = 1024
"""Bytes of `max_payload` left free: the server counts headers too, which something on the way may add."""
_CHECK_S = 0.25
"""How often the supervisor looks whether the client closed without telling."""
_CLOSE_S = 1.0
"""How long a goodbye may take when the server no longer reads."""
_SAY_S = 1.0
"""A service that waits for its first connection says so after this long."""
_SETTLE_S = 5
"""How long the server may take to confirm subscriptions."""


class BusConfig(msgspec.Struct, frozen=True, kw_only=True):
    url: str = "nats://127.0.0.1:4222"
    """One server, or several separated by commas."""
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """How long the first connection may take; later ones are tried for ever."""
    ping_interval_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """A server that leaves two pings unanswered is taken for gone when the third is due."""
    reconnect_wait_s: Annotated[float, msgspec.Meta(gt=0)] = 0.2
    """Mean wait between attempts; each is drawn between half and one and a half of it."""
    pending_size: Annotated[int, msgspec.Meta(ge=1)] = 2 * 1024 * 1024
    """Bytes that may wait for the socket; beyond, `publish` waits. Small for steps: a stale one should not wait at all."""
    flush_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """How long `publish` waits for a full buffer to be written before it raises BusDisconnected."""


class _Subscription:
    """A subscription that outlives clients."""

    def __init__(self, subject: str, callback: Callback, queue: str, forget: Callable[["_Subscription"], None]) -> None:
        self._subject = subject
        self._callback = callback
        self._queue = queue
        self._forget = forget
        self._client: Client | None = None
        self._current: ClientSubscription | None = None
        self._wanted = True
        # Callbacks log in the context of their subscriber, also when the supervisor has renewed the subscription.
        self._context = copy_context()

    async def renew(self, client: Client) -> None:
        """Subscribe at `client`, unless that has been done."""
        if self._client is client:
            return
        self._client = client
        subscribing = client.subscribe(self._subject, queue=self._queue, cb=self._deliver)
        self._current = await asyncio.get_running_loop().create_task(subscribing, context=self._context)
        if not self._wanted:
            await self._drop()

    async def unsubscribe(self) -> None:
        self._wanted = False
        self._forget(self)
        await self._drop()

    async def _drop(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            # A closed client has dropped its subscriptions already.
            with contextlib.suppress(nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError):
                await current.unsubscribe()

    async def _deliver(self, message: Msg) -> None:
        if not self._wanted:
            return
        try:
            self._callback(Delivery(message.subject, message.data, message.reply))
        except Exception:
            # One message that cannot be read must not end the subscription for all that follow.
            log.exception("bus callback failed", subject=message.subject)


class NatsBus:
    """A `Bus` over one NATS connection. One TCP stream is first in, first out: give steps and bulk data their own."""

    def __init__(self, config: BusConfig, name: str) -> None:
        """Use `NatsBus.connect`."""
        self._config = config
        self._name = name
        self._client = Client()
        self._connected = False
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._subscriptions: dict[_Subscription, None] = {}
        self._listeners: list[Callable[[bool], None]] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._last_error: Exception | None = None

    @classmethod
    async def connect(cls, config: BusConfig, *, name: str) -> "NatsBus":
        """Connect under a name that NATS' monitoring shows. Raises BusDisconnected after `connect_timeout_s`."""
        bus = cls(config, name)
        address = _without_credentials(config.url)
        waiting = asyncio.get_running_loop().call_later(_SAY_S, lambda: log.info("waiting for NATS", url=address))
        try:
            async with asyncio.timeout(config.connect_timeout_s):
                await bus._establish()
        except TimeoutError:
            raise BusDisconnected(
                f"NATS at {address} is not reachable within {config.connect_timeout_s:g} s"
                f" ({bus._last_error or 'no answer'})"
            ) from None
        finally:
            waiting.cancel()
        bus._connected = True
        bus._supervisor = asyncio.create_task(bus._supervise(), name=f"nats {name}")
        return bus

    @property
    def max_payload(self) -> int:
        return self._client.max_payload - _HEADER_MARGIN

    @property
    def connected(self) -> bool:
        return self._connected and self._client.is_connected

    async def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        self._check(subject, payload)
        task = asyncio.current_task()
        assert task is not None, "publish runs in a task"
        cancelling = task.cancelling()
        try:
            await self._client.publish(subject, payload, reply=reply)
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError):
            raise self._disconnected() from None
        # Waiting for a full buffer, nats-py swallows a cancellation and only reports a timeout aside.
        if task.cancelling() > cancelling:
            raise asyncio.CancelledError
        if self._client.pending_data_size > self._config.pending_size:
            raise BusDisconnected(
                f"NATS has not read for {self._config.flush_timeout_s:g} s: {self._client.pending_data_size} bytes wait,"
                f" the buffer takes {self._config.pending_size}"
            )

    async def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> _Subscription:
        subscription = _Subscription(subject, callback, queue, lambda gone: self._subscriptions.pop(gone, None))
        self._subscriptions[subscription] = None
        if self._client.is_connected:
            # A client that closes at this moment is replaced, and the new one has the subscription.
            with contextlib.suppress(nats.errors.ConnectionClosedError, nats.errors.FlushTimeoutError):
                await subscription.renew(self._client)
                await self._settle(self._client)
        return subscription

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        self._check(subject, payload)
        lost = self._lost
        answer = asyncio.ensure_future(self._client.request(subject, payload, timeout=timeout_s))
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._disconnected()
            return answer.result().data
        except nats.errors.NoRespondersError:
            raise NoResponders(f"nobody answers on {subject!r}") from None
        except nats.errors.TimeoutError:
            raise RequestTimeout(f"no answer on {subject!r} within {timeout_s:g} s") from None
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError):
            raise self._disconnected() from None
        finally:
            answer.cancel()

    def on_connection_change(self, callback: Callable[[bool], None]) -> None:
        self._listeners.append(callback)

    async def close(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        self._connected = False
        # Writes what is buffered; a server that is gone or does not read cannot be helped any more.
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._client.close()
        await self._discard(self._client)
        if not self._lost.done():
            self._lost.set_result(None)

    def _check(self, subject: str, payload: bytes) -> None:
        if len(payload) > self.max_payload:
            raise PayloadTooLarge(subject, len(payload), self.max_payload)
        if not self.connected:
            raise self._disconnected()

    def _disconnected(self) -> BusDisconnected:
        return BusDisconnected(f"NATS at {_without_credentials(self._config.url)} is away")

    async def _supervise(self) -> None:
        while True:
            while not self._client.is_closed:
                await asyncio.wait((self._lost,), timeout=_CHECK_S)
            if not self._lost.done():
                self._lost.set_result(None)
            log.warning("NATS is away", reason=str(self._client.last_error or self._last_error or "closed"))
            self._announce(False)
            await self._discard(self._client)
            await self._establish()
            log.info("NATS is back")
            self._announce(True)

    def _announce(self, connected: bool) -> None:
        self._connected = connected
        for listener in self._listeners:
            listener(connected)

    async def _establish(self) -> None:
        """Connect a new client and renew all subscriptions; tries until it succeeds or is cancelled."""
        while True:
            client = Client()
            try:
                await self._open(client)
                self._client = client  # from here on new subscriptions go to it directly
                for subscription in list(self._subscriptions):
                    await subscription.renew(client)
                await self._settle(client)
                return
            except (OSError, TimeoutError, nats.errors.Error) as error:
                self._last_error = error
                await self._discard(client)
                await asyncio.sleep(self._jittered_wait_s())
            except asyncio.CancelledError:
                await self._discard(client)
                raise

    async def _open(self, client: Client) -> None:
        lost = self._lost = asyncio.get_running_loop().create_future()

        async def on_closed() -> None:
            if not lost.done():
                lost.set_result(None)

        await client.connect(
            servers=[url.strip() for url in self._config.url.split(",")],
            name=self._name,
            error_cb=self._on_error,
            closed_cb=on_closed,
            allow_reconnect=False,
            max_reconnect_attempts=-1,  # here: of the first connection, until the caller's timeout
            reconnect_time_wait=self._jittered_wait_s(),  # type: ignore[arg-type]  # any number of seconds will do
            connect_timeout=2,
            ping_interval=self._config.ping_interval_s,  # type: ignore[arg-type]
            max_outstanding_pings=2,
            pending_size=self._config.pending_size,
            flush_timeout=self._config.flush_timeout_s,
        )

    async def _settle(self, client: Client) -> None:
        """Wait until the server knows all subscriptions: one round trip each, at the start and never per message.

        Raises ConnectionClosedError and FlushTimeoutError.
        """
        # nats-py writes its PING past the commands that still wait for the flusher; the second one comes behind them.
        for _ in range(2):
            # Not `flush`: given up, it leaves a cancelled future behind, and the PONG that comes late ends nats-py's reader.
            if client.is_closed:
                raise nats.errors.ConnectionClosedError
            pong = asyncio.get_running_loop().create_future()
            await client._send_ping(pong)
            await asyncio.wait((pong, self._lost), timeout=_SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                raise nats.errors.ConnectionClosedError
            if not pong.done():
                raise nats.errors.FlushTimeoutError

    async def _discard(self, client: Client) -> None:
        """Release all that a client holds, also when its own close stopped half way at a dead socket.

        nats-py has no such way out, hence the private names.
        """
        client._pending.clear()
        client._pending_data_size = 0
        writer = client._transport._io_writer if isinstance(client._transport, TcpTransport) else None
        if writer is not None and writer.transport.get_write_buffer_size():
            writer.transport.abort()  # closing would wait for the server to read what is stale by now
        if client.is_closed:
            client._status = Client.DISCONNECTED
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await client.close()

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        if isinstance(error, nats.errors.SlowConsumerError):
            log.error("messages dropped: the subscriber is too slow", subject=error.subject)
        else:
            log.debug("NATS error", error=str(error))

    def _jittered_wait_s(self) -> float:
        return self._config.reconnect_wait_s * random.uniform(0.5, 1.5)


def _without_credentials(urls: str) -> str:
    return re.sub(r"//[^@/,]*@", "//", urls)
