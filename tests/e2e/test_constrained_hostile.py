"""Constraints made to hurt, sent over HTTP: each is answered soon, and nobody else notices."""

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.stack import Stack

pytestmark = pytest.mark.slow

ANSWER_WITHIN_S = 3.0
NUM_STREAMS = 4
STREAM_TOKENS = 3000
SETTLED = 20
"""Pieces after which a stream is under way."""
LONGEST_GAP_S = 1.0
MEMORY_MIB = 1024
"""Of the service with all its processes: each may take 768 MiB for one constraint, and gives them back."""


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(keyword: str, depth: int) -> dict[str, Any]:
    """Each definition asks for the next one twice: 2^depth schemas when written out."""
    twice = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**twice, f"d{depth}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}}


BOMBS: dict[str, dict[str, Any]] = {
    "nested quantifiers": {"regex": "(a{1000}){1000}"},
    "catastrophic backtracking": {"regex": "((a+)+)+b"},
    "many searches": {"regex": "(.*a){25}"},
    "60,000 words": {"regex": "|".join(f"w{i}" for i in range(60_000))},
    "a schema of a million characters": form({"enum": [f"{i:0200d}" for i in range(5000)]}),
    "10,000 alternatives": form({"enum": list(range(10_000))}),
    "10,000 choices": {"choice": [f"choice {i}" for i in range(10_000)]},
    "3,000 objects": form({"anyOf": [{"properties": {f"p{i}": nested(3)}} for i in range(3000)]}),
    "nested too deeply": form(nested(400)),
    "doubling allOf": form(doubling("allOf", 60)),
    "doubling anyOf": form(doubling("anyOf", 60)),
    "long array": form({"type": "array", "items": nested(20), "minItems": 10**6}),
    "product of searches": form(
        {"allOf": [{"type": "string", "pattern": f"[a-z]*{c}[a-z]{{40}}"} for c in "abcdefgh"]}
    ),
    "ambiguous grammar": {"ebnf": 'start: s\ns: s s | s s s | "a" | ""'},
    "words of words": {"ebnf": "start: s\ns: s s | t\nt: t t | /[a-z ]/"},
    "endless rule": {"ebnf": "start: a\na: a a"},
}
HARMLESS = {"catastrophic backtracking", "many searches", "doubling allOf", "doubling anyOf", "long array"}
"""Bombs for other engines: an automaton never backtracks, equal schemas are one, and items are counted, not written out."""


def body(engine: Stack, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Write."}]
    return {"model": engine.model, "messages": messages, "temperature": 0, "max_tokens": 40, **fields}


class Watch:
    """Streams that run all the while, and when their pieces came."""

    def __init__(self, client: httpx.AsyncClient, engine: Stack) -> None:
        self._client = client
        self._engine = engine
        self._times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        self._all_run = asyncio.Event()

    async def follow(self, number: int) -> None:
        request = body(self._engine, max_tokens=STREAM_TOKENS, ignore_eos=True, stream=True, seed=number)
        async with self._client.stream("POST", "/v1/chat/completions", json=request) as response:
            assert response.status_code == 200, await response.aread()
            async for _ in response.aiter_raw():
                self._times[number].append(time.monotonic())
                if all(len(times) > SETTLED for times in self._times):
                    self._all_run.set()

    async def until_all_run(self) -> None:
        async with asyncio.timeout(60):
            await self._all_run.wait()

    def gaps(self, since_s: float, until_s: float) -> list[float]:
        """Seconds between pieces, of all streams, the longest last."""
        inside = ([t for t in times if since_s <= t <= until_s] for times in self._times)
        return sorted(after - before for times in inside for before, after in pairwise(times))


def high(gaps: Sequence[float]) -> float:
    """The 99th percentile of sorted values."""
    return gaps[int(0.99 * len(gaps))]


def memory_mib(pids: Sequence[int]) -> float:
    """Resident memory of processes and their children."""
    total = 0.0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # one that was killed and replaced meanwhile
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / 1024
        total += memory_mib([int(child) for child in children.split()])
    return total


async def test_hostile_constraints_are_answered_soon_and_disturb_no_stream(engine: Stack) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=engine.base_url, timeout=60, trust_env=False, limits=limits) as client:
        watch = Watch(client, engine)
        streams = [asyncio.create_task(watch.follow(number)) for number in range(NUM_STREAMS)]
        await watch.until_all_run()
        began_s = time.monotonic()
        await asyncio.sleep(4.0)  # the measurement without bombs
        calm_until_s = time.monotonic()
        answers: dict[str, tuple[int, float]] = {}
        peak_mib = 0.0
        for name, bomb in BOMBS.items():
            content = json.dumps(body(engine, **bomb))
            started_s = time.monotonic()
            response = await client.post("/v1/chat/completions", content=content)
            answers[name] = response.status_code, time.monotonic() - started_s
            if response.status_code != 200:
                assert response.json()["error"]["message"]
            peak_mib = max(peak_mib, memory_mib([engine.services["grammar"].process.pid]))
        ended_s = time.monotonic()
        calm, disturbed = watch.gaps(began_s, calm_until_s), watch.gaps(calm_until_s, ended_s)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    print({name: f"{status} {seconds:.2f} s" for name, (status, seconds) in answers.items()})
    print(
        f"gaps: longest {calm[-1] * 1e3:.0f} ms before, {disturbed[-1] * 1e3:.0f} ms with bombs; memory {peak_mib:.0f} MiB"
    )
    for name, (status, seconds) in answers.items():
        assert status == (200 if name in HARMLESS else 400), name
        assert seconds < ANSWER_WITHIN_S, name
    assert peak_mib < MEMORY_MIB
    # A bomb is one more process that wants a core for two seconds; it never holds up a step. Machines hiccup by themselves,
    # so the longest gap of all has a bound of its own.
    assert high(disturbed) < 2 * high(calm) + 0.05
    assert disturbed[-1] < LONGEST_GAP_S
