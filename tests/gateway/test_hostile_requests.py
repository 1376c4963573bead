"""What no honest client sends: answered with a clear 4xx or a closed connection, and the next request works."""

import asyncio
import json

import pytest

from tests.support.gateway_world import MODEL, World, gateway_world

VALID = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 5}).encode()
FIFTY_MEGABYTES = 50 * 10**6


async def send(world: World, data: bytes, timeout_s: float = 10.0) -> tuple[int, dict]:
    """Write bytes on a connection of its own; the status and the error of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.actor.port)
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(data)
            status = int((await reader.readline()).split()[1])
            headers = {}
            while line := (await reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            body = await reader.readexactly(int(headers["content-length"]))
            return status, json.loads(body).get("error", {})
    finally:
        writer.close()


def request(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    head = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def still_serves(world: World) -> None:
    assert (await world.complete()).status_code == 200


@pytest.mark.parametrize(
    ("body", "mention"),
    [
        (b"", "empty"),
        (b"{", "JSON"),
        (VALID[:-1] + b",}", "JSON"),
        (b"\xff" + VALID, "UTF-8"),
        (VALID.replace(b"hi", b"\xc3\x28"), "UTF-8"),
        (VALID.replace(b"hi", b"\xed\xa0\x80"), "UTF-8"),
        (VALID.decode().encode("utf-16"), "UTF-8"),
        (b"\x00" * 100, "JSON"),
        (VALID.replace(b"5", b"NaN"), "JSON"),
        (VALID.replace(b"5", b"1" * 5000), "max_tokens"),
        (b"[" * 10_000 + b"]" * 10_000, "`object`, got `array`"),
        (VALID[:-1] + b',"unknown":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, "nested"),
        (VALID[:-1] + b',"json_schema":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, "nested"),
    ],
)
async def test_a_malformed_body_is_400_with_the_reason(world, body, mention):
    status, error = await send(world, request(body))
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    assert mention in error["message"]
    await still_serves(world)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/tokenize"])
async def test_deep_nesting_is_400_at_every_door(world, path):
    deep = b'{"model":"bytes-1","x":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    reply = await world.client.post(path, content=deep, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    await still_serves(world)


async def test_fifty_megabytes_are_413_whether_announced_or_not(world):
    status, error = await send(
        world, request(b"", b"Expect: 100-continue").replace(b"h: 0", b"h: %d" % FIFTY_MEGABYTES)
    )
    assert (status, error["code"]) == (413, "request_too_large")
    assert str(FIFTY_MEGABYTES) in error["message"]

    async def pieces():
        for _ in range(FIFTY_MEGABYTES // 10**6):
            yield b" " * 10**6

    headers = {"Content-Type": "application/json"}
    chunked = await world.client.post("/v1/completions", content=pieces(), headers=headers)
    assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "request_too_large")
    whole = await world.client.post("/v1/completions", content=b" " * FIFTY_MEGABYTES, headers=headers)
    assert whole.status_code == 413
    await still_serves(world)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, 400),  # TLS on a plain port
        (b"POST /v1/completions HTTP/9.9\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nX-Nul: a\x00b\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"X-Many: 1\r\n" * 20_000 + b"\r\n", 431),
        (b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"X" * 100_000 + b": 1\r\n\r\n", 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (request(VALID, b"Content-Type: text/html"), 415),
        (request(VALID, b"Content-Encoding: gzip"), 415),
    ],
)
async def test_abuse_of_the_protocol_is_a_clear_4xx(world, data, status):
    answered, error = await send(world, data)
    assert (answered, error["type"]) == (status, "invalid_request_error")
    await still_serves(world)


async def test_odd_headers_alone_do_no_harm(world):
    odd = [b"Authorization: " + bytes(range(128, 256)), b"X-Request-Id: " + b"x" * 500, b"Accept-Encoding: \xff"]
    answered, error = await send(world, request(VALID, *odd))
    assert (answered, error) == (200, {})


async def test_a_thousand_bad_requests_leave_nothing_behind(tmp_path):
    async with gateway_world(tmp_path) as world:
        bad = [request(b"{"), b"GET\r\n\r\n", request(VALID)[:-3], b""]
        for start in range(0, 1000, 100):
            connections = await asyncio.gather(
                *(asyncio.open_connection("127.0.0.1", world.actor.port) for _ in range(100))
            )
            for number, (_, writer) in enumerate(connections):
                writer.write(bad[(start + number) % len(bad)])
                writer.write_eof()
            for reader, writer in connections:
                await reader.read()
                writer.close()
        await still_serves(world)
        assert world.gateway.num_active == 0
