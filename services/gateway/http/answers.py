"""Bodies in, answers out: the few things all endpoints do with an ASGI connection."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import Receive, Scope, Send

from services.gateway.api.dialect import encode_json
from services.gateway.errors import ApiError, ErrorBody, invalid, too_large
from services.gateway.lifeline import ClientGone

Headers = Iterable[tuple[bytes, bytes]]

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

MAX_WRITE_BYTES = 64 * 1024


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError (408, 413, 415) and ClientGone."""
    _check_headers(scope, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _receive_all(receive, max_bytes)
    except TimeoutError:
        message = f"the body was not complete after {timeout_s:g} s"
        headers = {"Connection": "close"}
        raise ApiError(408, message, kind="timeout_error", code="body_timeout", headers=headers) from None


def _check_headers(scope: Scope, max_bytes: int) -> None:
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if content_type != b"application/json" and not content_type.endswith(b"+json"):
        problem = f"the content type is {content_type.decode('latin-1')!r}, expected application/json"
        raise ApiError(415, problem, kind="invalid_request_error", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "compressed bodies are not supported", kind="invalid_request_error")
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit():
        raise invalid(None, "the header Content-Length is not a number")
    if int(declared) > max_bytes:
        raise too_large(max_bytes, int(declared))


async def _receive_all(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_json(send: Send, value: Any, *, status: int = 200, headers: Headers = ()) -> None:
    await send_bytes(send, encode_json(value), b"application/json", status=status, headers=headers)


async def send_bytes(send: Send, body: bytes, content_type: bytes, *, status: int = 200, headers: Headers = ()) -> None:
    own = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, shape: Callable[[ErrorBody], Any]) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    await send_json(send, shape(error.body), status=error.status, headers=headers)


class EventStream:
    """Server-sent events to one client.

    has_begun      the status is on its way: an error can only be an event now
    sending_since  when the write that is under way began; None between writes
    written_s      when the last write ended, on the clock of the event loop
    """

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self.sending_since: float | None = None
        self.written_s = _now()
        self._send = send

    async def begin(self) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})

    async def write(self, data: bytes) -> None:
        """Waits while the client does not read and its buffers are full."""
        if data:
            self.sending_since = _now()
            # The server looks at its buffer before a write and never in the middle of one.
            for start in range(0, len(data), MAX_WRITE_BYTES):
                part = data[start : start + MAX_WRITE_BYTES]
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
            self.sending_since, self.written_s = None, _now()

    async def end(self, data: bytes) -> None:
        start = max(0, len(data) - MAX_WRITE_BYTES)
        await self.write(data[:start])
        await self._send({"type": "http.response.body", "body": data[start:]})


def _now() -> float:
    return asyncio.get_running_loop().time()
