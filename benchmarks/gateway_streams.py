"""What one gateway process costs per streamed token: `python -m benchmarks.gateway_streams [--streams 1000] [--tokens 200]`.

A real gateway on a real NATS; tokenizer, router and scheduler are played by this process, which sends one frame per step with a
token for every stream. Clients are a third process that reads and counts. The gateway's cost is its own CPU time, so the
result holds however busy the machine is: tokens per second and core, beside a bare ASGI application on the same server that
sends ready-made chunks of the same size.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
import uvloop

from benchmarks.machine import describe_machine
from shared import subjects
from shared.messages.generation import Emission, FinishReason, Frame, Submit
from shared.messages.packing import pack, pack_int32
from shared.nats_bus import BusConfig, NatsBus
from tests.support.gateway_world import MODEL, Mesh, write_model_folder
from tests.support.nats import NatsServer
from tests.support.stack import REPO, free_port

STEP_S = 0.02
TOKEN = pack_int32([ord("a")])


@dataclass
class Count:
    """What the clients saw."""

    finished: int
    num_bytes: int
    seconds: float


async def read_streams(port: int, path: str, body: bytes, num_streams: int) -> Count:
    """Open all streams at once and read each to its end."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def read_one() -> tuple[bool, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        writer.write(head + body)
        num_bytes, tail = 0, b""
        while data := await reader.read(2**16):
            num_bytes += len(data)
            tail = (tail + data)[-64:]
        writer.close()
        return b"[DONE]" in tail, num_bytes

    started = time.perf_counter()
    results = await asyncio.gather(*(read_one() for _ in range(num_streams)))
    return Count(sum(done for done, _ in results), sum(size for _, size in results), time.perf_counter() - started)


def read_in_process(
    port: int, path: str, body: bytes, num_streams: int, result: "multiprocessing.Queue[Count]"
) -> None:
    result.put(uvloop.run(read_streams(port, path, body, num_streams)))


async def play_scheduler(mesh: Mesh, bus: NatsBus, num_streams: int, num_tokens: int) -> None:
    """When everything is submitted, send `num_tokens` frames with a token for each stream."""
    await mesh.until(lambda: len(mesh.submits) >= num_streams, timeout_s=60)
    submits: list[Submit] = mesh.submits
    subject = subjects.gateway_frames(MODEL, submits[0].gateway_id)
    for position in range(num_tokens):
        began = time.perf_counter()
        finish = FinishReason.LENGTH if position == num_tokens - 1 else None
        emissions = tuple(
            Emission(request_id=submit.request_id, position=position, token_ids=TOKEN, finish=finish)
            for submit in submits
        )
        frame = Frame(replica_id=mesh.replica_id, epoch=1, seq=position + 1, emissions=emissions)
        await bus.publish(subject, pack(frame))
        await asyncio.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def measure_gateway(num_streams: int, num_tokens: int, stop: bool) -> None:
    """Start gateway, mesh and clients; print the result."""
    server, port = NatsServer(), free_port()
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder))
        flags = ["--model", MODEL, "--model-path", folder, "--nats-url", server.url, "--port", str(port)]
        gateway = start_gateway(flags)
        bus = await NatsBus.connect(BusConfig(url=server.url), name="benchmark")
        mesh = Mesh(bus)  # type: ignore[arg-type]  # a bus is a bus
        mesh.answer = lambda submit: None
        await mesh.start()
        beating = asyncio.create_task(mesh.beat_forever())
        try:
            await wait_ready(port)
            fields = {"model": MODEL, "prompt": "hi", "max_tokens": num_tokens, "stream": True}
            body = json.dumps(fields | ({"stop": ["zzz", "aab"]} if stop else {})).encode()
            idle_bytes = resident_bytes(gateway.pid)
            results: multiprocessing.Queue[Count] = multiprocessing.Queue()
            clients = multiprocessing.Process(
                target=read_in_process, args=(port, "/v1/completions", body, num_streams, results)
            )
            clients.start()
            await mesh.until(lambda: len(mesh.submits) >= num_streams, timeout_s=60)
            before = cpu_seconds(gateway.pid)
            await play_scheduler(mesh, bus, num_streams, num_tokens)
            count = await asyncio.to_thread(results.get)
            cpu_s = cpu_seconds(gateway.pid) - before
            report("gateway with stop strings" if stop else "gateway", count, cpu_s, num_streams, num_tokens)
            grown = (resident_bytes(gateway.pid) - idle_bytes) / num_streams / 1024
            print(f"  memory: {grown:.0f} KiB per stream at the peak")
        finally:
            beating.cancel()
            gateway.terminate()
            gateway.wait()
            await bus.close()
            server.close()


def start_gateway(flags: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "services.gateway", *flags, "--log-level", "error"], cwd=REPO)


async def wait_ready(port: int) -> None:
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                if (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"bytes-1","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
)


def serve_bare(port: int, num_streams: int, num_tokens: int) -> None:
    """The least that a stream can cost on this server: ready-made chunks, written at the same pace."""
    steps: list[asyncio.Event] = []
    waiting = 0

    async def drive() -> None:
        for step in steps:
            step.set()
            await asyncio.sleep(STEP_S)

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        nonlocal waiting
        if not steps:
            steps.extend(asyncio.Event() for _ in range(num_tokens))
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        waiting += 1
        if waiting == num_streams:
            app.driver = asyncio.create_task(drive())  # type: ignore[attr-defined]
        for step in steps:
            await step.wait()
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    uvicorn.run(app, port=port, http="httptools", loop="uvloop", log_level="error", access_log=False, lifespan="off")


async def measure_bare(num_streams: int, num_tokens: int) -> None:
    port = free_port()
    server = multiprocessing.Process(target=serve_bare, args=(port, num_streams, num_tokens))
    server.start()
    try:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                await asyncio.sleep(0.05)
        assert server.pid is not None
        before = cpu_seconds(server.pid)
        results: multiprocessing.Queue[Count] = multiprocessing.Queue()
        clients = multiprocessing.Process(target=read_in_process, args=(port, "/", b"{}", num_streams, results))
        clients.start()
        count = await asyncio.to_thread(results.get)
        report("bare ASGI application", count, cpu_seconds(server.pid) - before, num_streams, num_tokens)
    finally:
        server.terminate()
        server.join()


def report(name: str, count: Count, cpu_s: float, num_streams: int, num_tokens: int) -> None:
    total = num_streams * num_tokens
    print(
        f"{name}: {total / cpu_s:,.0f} tokens/s per core ({cpu_s / total * 1e6:.1f} us each); "
        f"{count.finished} of {num_streams} streams finished in {count.seconds:.1f} s, "
        f"{count.num_bytes / total:.0f} bytes per token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    print(describe_machine())
    uvloop.run(measure_bare(arguments.streams, arguments.tokens))
    uvloop.run(measure_gateway(arguments.streams, arguments.tokens, stop=False))
    uvloop.run(measure_gateway(arguments.streams, arguments.tokens, stop=True))


if __name__ == "__main__":
    main()
