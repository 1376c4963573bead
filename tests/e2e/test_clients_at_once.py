"""A thousand streams at a time through one gateway: none is lost, and its memory stays bounded."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from benchmarks.gateway_streams import resident_bytes
from tests.support.default_model import default_model_folder
from tests.support.stack import Stack

pytestmark = pytest.mark.slow

NUM_STREAMS = 1000
NUM_TOKENS = 40
MAX_BYTES_PER_STREAM = 200 * 1024


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(model_path=str(default_model_folder())) as running:
        running.start_all(
            *("--model-kind", "simulated", "--simulated-step-ms", "5", "--num-slots", "200000"),
            scheduler_flags=("--max-running-reqs", str(NUM_STREAMS)),
        )
        yield running


def gateway_pid(stack: Stack) -> int:
    return stack.services["gateway"].process.pid


async def read_stream(port: int, body: bytes, all_open: asyncio.Barrier) -> list[bytes]:
    """The events of one stream; nobody reads before all have asked."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    await all_open.wait()
    answer = await reader.read()
    writer.close()
    return [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]


async def test_a_thousand_streams_are_served_at_once_and_none_is_lost(stack: Stack) -> None:
    before = resident_bytes(gateway_pid(stack))
    all_open = asyncio.Barrier(NUM_STREAMS)
    bodies = [
        json.dumps(
            {
                "model": stack.model,
                "prompt": f"Story {number}.",
                "max_tokens": NUM_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for number in range(NUM_STREAMS)
    ]
    async with asyncio.timeout(90):
        streams = await asyncio.gather(*(read_stream(stack.port, body, all_open) for body in bodies))
    for events in streams:
        assert events[-1] == b"[DONE]", events[-1]
        assert json.loads(events[-2])["usage"]["completion_tokens"] == NUM_TOKENS
    assert (resident_bytes(gateway_pid(stack)) - before) / NUM_STREAMS < MAX_BYTES_PER_STREAM
