"""The HTTP server: uvicorn with limits on connections and request heads, and errors as JSON."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.api.dialect import encode_json
from services.gateway.config import GatewayConfig
from services.gateway.errors import ApiError
from services.gateway.http.call import ABORT_EXTENSION, SURPLUS_EXTENSION
from shared.config import StartupError
from shared.telemetry import get_logger

log = get_logger(__name__)

RESERVED_FILES = 0.1
"""Share of the descriptors kept for what is no client (the bus, logs) and for connections that are told "503"."""
KEEP_ALIVE_S = 30
BACKLOG = 2048


class HttpServer:
    """Listens from `listen` on; `port` is then known."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._config = config
        self._max_connections = min(config.max_connections, int(_raise_file_limit() * (1 - RESERVED_FILES)))
        if self._max_connections < config.max_connections:
            log.warning("fewer connections than configured", max_connections=self._max_connections, reason="ulimit -n")
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_protocol(self._max_connections, config.max_header_bytes, config.receive_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(config.drain_timeout_s) + 1,
            )
        )
        self._socket: socket.socket | None = None

    @property
    def port(self) -> int:
        assert self._socket is not None, "the server listens"
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """Those that are open."""
        return len(self._server.server_state.connections)

    def listen(self) -> None:
        """Take the port. Raises StartupError when it is taken."""
        config = self._config
        try:
            family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            raise StartupError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from None
        listener.setblocking(False)
        self._socket = listener

    async def serve(self) -> None:
        """Answer until cancelled or stopped."""
        assert self._socket is not None, "listen first"
        await self._server.serve([self._socket])

    def stop(self) -> None:
        """Take no new connections; `serve` returns when the open ones have ended."""
        self._server.should_exit = True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # signals belong to the service that hosts this server


def _raise_file_limit() -> int:
    """Let this process have as many descriptors as it may; that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 2**20


def _protocol(max_connections: int, max_header_bytes: int, head_timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn makes one instance per connection, from the class alone: so the limits are bound into a class."""

    class Protocol(_LimitedProtocol):
        limit_connections = max_connections
        limit_header_bytes = max_header_bytes
        limit_head_s = head_timeout_s

    return Protocol


class _LimitedProtocol(HttpToolsProtocol):
    limit_connections: int
    limit_header_bytes: int
    limit_head_s: float
    _head_bytes = 0
    _is_surplus = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        self._is_surplus = len(self.connections) > self.limit_connections

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        if self._head_timer is None:  # not the first request of this connection
            self._expect_head()
        super().on_message_begin()
        extensions: dict[str, Any] = {ABORT_EXTENSION: self.transport.abort}
        if self._is_surplus:
            # Refused by the gate, after the request was read: a client that is still sending would see a reset.
            extensions[SURPLUS_EXTENSION] = self.limit_connections
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        """A connection that sends no head, or a bit of it now and then, does not stay open for ever."""
        self._head_timer = self.loop.call_later(self.limit_head_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self.limit_header_bytes:
            raise ValueError(f"the head of the request exceeds {self.limit_header_bytes} bytes")

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > self.limit_header_bytes:
            message = f"the head of the request has more than {self.limit_header_bytes} bytes, which is the limit"
            self._refuse(ApiError(431, message, kind="invalid_request_error", code="headers_too_large"))
        else:
            self._refuse(ApiError(400, msg, kind="invalid_request_error", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer outside of any request, and hang up."""
        body = encode_json(error.body)
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
