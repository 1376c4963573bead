"""What ASGI frameworks and servers cost per streamed chunk: `python -m benchmarks.asgi_frameworks [--streams 200] [--chunks 200]`.

Frameworks: Starlette's routing around plain ASGI as the gateway has it, Starlette's own StreamingResponse, Litestar. Servers:
uvicorn (httptools, uvloop) and granian (one worker, uvloop). All decode the request and encode each chunk with msgspec, and send a
chunk to every stream each 20 ms. Clients are another process. The figure is chunks per second of the server's CPU time, that of
its threads and children included: the result holds however busy the machine is. Litestar and granian are in the extra `bench`.
"""

import argparse
import asyncio
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import msgspec
import psutil
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.gateway_streams import STEP_S, Count, read_in_process
from benchmarks.machine import describe_machine
from tests.support.stack import REPO, free_port

FRAMEWORKS = {
    "Starlette routes, plain ASGI": "plain_streams",
    "Starlette StreamingResponse": "starlette_streams",
    "Litestar Stream": "litestar_streams",
}
SERVERS = ("uvicorn", "granian")
START_TIMEOUT_S = 20.0
PATH = "/v1/completions"
BODY = b'{"model":"m","prompt":"hi","stream":true}'
SIZES = ("BENCH_STREAMS", "BENCH_CHUNKS")
"""Environment of the server processes, whose applications a server makes without arguments."""


class StreamRequest(msgspec.Struct):
    model: str
    prompt: str
    stream: bool


class Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[Choice]
    object: str = "text_completion"


decode = msgspec.json.Decoder(StreamRequest).decode
encode = msgspec.json.Encoder().encode


class Pacer:
    """Lets every stream send one chunk per step, from the moment when all have arrived."""

    def __init__(self) -> None:
        self._num_streams, num_chunks = (int(os.environ[name]) for name in SIZES)
        self._steps = [asyncio.Event() for _ in range(num_chunks)]
        self._num_arrived = 0

    async def chunks(self, request: StreamRequest) -> AsyncIterator[bytes]:
        self._num_arrived += 1
        if self._num_arrived == self._num_streams:
            self._driving = asyncio.create_task(self._drive())
        for step in self._steps:
            await step.wait()
            chunk = Chunk(id="cmpl-0123456789abcdef", created=1700000000, model=request.model, choices=[Choice(0, "a")])
            yield b"data: " + encode(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _drive(self) -> None:
        for step in self._steps:
            step.set()
            await asyncio.sleep(STEP_S)


def plain_streams() -> ASGIApp:
    pacer = Pacer()

    class Endpoint:  # a function would be taken for a handler of Starlette's Request
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            request = decode((await receive())["body"])
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in pacer.chunks(request):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    return Router([Route(PATH, Endpoint(), methods=["POST"])])


def starlette_streams() -> ASGIApp:
    pacer = Pacer()

    async def endpoint(request: Request) -> StreamingResponse:
        return StreamingResponse(pacer.chunks(decode(await request.body())), media_type="text/event-stream")

    return Router([Route(PATH, endpoint, methods=["POST"])])


def litestar_streams() -> ASGIApp:
    from litestar import Litestar, post
    from litestar.response import Stream

    pacer = Pacer()

    @post(PATH, status_code=200)
    async def endpoint(data: StreamRequest) -> Stream:
        return Stream(pacer.chunks(data), media_type="text/event-stream")

    return Litestar([endpoint], openapi_config=None, logging_config=None)


def command(server: str, factory: str, port: int) -> list[str]:
    target = f"benchmarks.asgi_frameworks:{factory}"
    common = [sys.executable, "-m", server, target, "--factory", "--port", str(port), "--loop", "uvloop"]
    if server == "uvicorn":
        return [*common, "--http", "httptools", "--lifespan", "off", "--log-level", "error", "--no-access-log"]
    own = ["--interface", "asginl", "--http", "1", "--no-ws", "--workers", "1", "--log-level", "error"]
    return [*common, *own, "--backpressure", "65536"]


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process and its children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


async def until_listening(port: int) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def measure(server: str, factory: str, num_streams: int, num_chunks: int) -> float:
    """Seconds of CPU time per chunk. Raises RuntimeError when a stream was lost."""
    port = free_port()
    environ = os.environ | dict(zip(SIZES, (str(num_streams), str(num_chunks)), strict=True))
    process = subprocess.Popen(command(server, factory, port), cwd=REPO, env=environ)
    try:
        asyncio.run(until_listening(port))
        time.sleep(0.5)  # imports may go on behind the open port
        before = cpu_seconds(psutil.Process(process.pid))
        results: multiprocessing.Queue[Count] = multiprocessing.Queue()
        clients = multiprocessing.Process(target=read_in_process, args=(port, PATH, BODY, num_streams, results))
        clients.start()
        count = results.get(timeout=120)
        spent_s = cpu_seconds(psutil.Process(process.pid)) - before
        clients.join()
    finally:
        process.terminate()
        process.wait()
    if count.finished < num_streams:
        raise RuntimeError(f"{server}, {factory}: {count.finished} of {num_streams} streams were finished")
    return spent_s / (num_streams * num_chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many runs is shown")
    arguments = parser.parse_args()
    print(describe_machine())
    for name, factory in FRAMEWORKS.items():
        for server in SERVERS:
            needed = [server, *(["litestar"] if "litestar" in factory else [])]
            if absent := [package for package in needed if importlib.util.find_spec(package) is None]:
                print(f"{name:30s} {server:8s} not measured: {', '.join(absent)} is in the extra `bench`")
                continue
            runs = [measure(server, factory, arguments.streams, arguments.chunks) for _ in range(arguments.repeats)]
            print(f"{name:30s} {server:8s} {1 / min(runs):9,.0f} chunks/s per core ({min(runs) * 1e6:.1f} us each)")


if __name__ == "__main__":
    main()
