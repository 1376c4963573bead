"""The endpoints that generate: one way through for all APIs, streamed or not."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from services.gateway.api.dialect import SSE_KEEPALIVE, Asked, Circumstances, Dialect, Interpreter, encode_json
from services.gateway.decoding import BodyDecoder
from services.gateway.errors import ApiError, ErrorBody, aborted
from services.gateway.exchange import Exchange
from services.gateway.gateway import Gateway
from services.gateway.generation.generation import Collected
from services.gateway.http.answers import EventStream, read_body, send_bytes
from services.gateway.http.call import Call, abort_connection, call_of
from services.gateway.lifeline import ClientGone, Lifeline
from shared.telemetry import get_logger, tracer

log = get_logger(__name__)
R = TypeVar("R")

SLOW_CLIENT = "slow_client"


class GenerationEndpoint(Generic[R]):
    """One route: `kind` is its request type, `interpret` plans requests of that type."""

    def __init__(
        self,
        gateway: Gateway,
        tool_parser: str,
        kind: type[R],
        interpret: Interpreter[R],
        shape_error: Callable[[ErrorBody], Any] | None = None,
    ) -> None:
        self._gateway = gateway
        self._tool_parser = tool_parser
        self._decoder = BodyDecoder(kind)
        self._interpret = interpret
        self._shape_error = shape_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, call = self._gateway, call_of(scope)
        if self._shape_error is not None:
            call.shape_error = self._shape_error
        body = await read_body(scope, receive, gateway.max_body_bytes, gateway.config.receive_timeout_s)
        asked = self._interpret(self._decoder.decode(body), self._circumstances())
        rids = asked.rids or (call.rid,)
        call.rid = rids[0]
        if (refusal := gateway.quotas.admit(call.key, gateway.now())) is not None:
            raise refusal
        dialect, stream = asked.make_dialect(call.rid), EventStream(send)
        try:
            with tracer().start_as_current_span("request"):
                async with Lifeline(receive) as lifeline:
                    last = await self._serve(asked, rids, dialect, stream, call, lifeline)
        except ApiError as error:
            if error.body.error.code == SLOW_CLIENT:
                log.warning("client does not read", error=str(error))
                abort_connection(scope)
                raise ClientGone from None
            if not stream.has_begun:
                raise
            log.warning("stream failed", error=str(error), status=error.status)
            last = dialect.failure(error.body)
        try:
            # Outside of the lifeline nobody watches the reader, so this has a time limit of its own.
            async with asyncio.timeout(gateway.config.slow_client_timeout_s):
                if stream.has_begun:
                    await stream.end(last)
                else:
                    await send_bytes(send, last, b"application/json")
        except TimeoutError:
            log.warning("client does not read the end of its answer")
            abort_connection(scope)
            raise ClientGone from None

    async def _serve(
        self,
        asked: Asked,
        rids: Sequence[str],
        dialect: Dialect,
        stream: EventStream,
        call: Call,
        lifeline: Lifeline,
    ) -> bytes:
        """Generate, and send all but the end of the answer, which is returned."""
        exchange = self._gateway.open(asked.plan, rids=rids, key=call.key, lifeline=lifeline)
        try:
            await exchange.start()
            return await (self._stream(exchange, dialect, stream) if asked.stream else self._collect(exchange, dialect))
        finally:
            self._gateway.close(exchange, reason=lifeline.reason)
            call.details |= exchange.summary()

    async def _stream(self, exchange: Exchange, dialect: Dialect, stream: EventStream) -> bytes:
        generation, keepalive_s = exchange.generation, self._gateway.config.keepalive_s
        exchange.on_tick(lambda now_s: self._watch(exchange, stream, now_s))
        await stream.begin()
        await stream.write(dialect.opening(generation))
        while True:
            # All that is ready goes out in one write.
            deltas = await exchange.advance()
            events = b"".join([dialect.delta(generation, choice, delta) for choice, delta in deltas])
            if generation.is_finished:
                return events + dialect.closing(generation)
            if not events and self._gateway.now() - stream.written_s >= keepalive_s:
                events = SSE_KEEPALIVE
            await stream.write(events)

    async def _collect(self, exchange: Exchange, dialect: Dialect) -> bytes:
        generation = exchange.generation
        collected = [Collected() for _ in generation.choices]
        while not generation.is_finished:
            for choice, delta in await exchange.advance():
                collected[choice].add(delta)
        return encode_json(dialect.whole(generation, collected))

    def _watch(self, exchange: Exchange, stream: EventStream, now_s: float) -> None:
        """A few times a second: does the client read, and has it heard from us?"""
        limit_s = self._gateway.config.slow_client_timeout_s
        if stream.sending_since is not None:
            if now_s - stream.sending_since > limit_s:
                exchange.cut(aborted(f"the client has read nothing for {limit_s:g} s", SLOW_CLIENT))
        elif now_s - stream.written_s >= self._gateway.config.keepalive_s:
            exchange.wake()

    def _circumstances(self) -> Circumstances:
        return Circumstances(
            facts=self._gateway.facts,
            config=self._gateway.config,
            tool_parser=self._tool_parser,
            now_s=int(time.time()),
            draw_seed=lambda: secrets.randbits(63),
        )
