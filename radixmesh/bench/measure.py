"""Runs a workload against a server and notes when each piece of each answer came."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from radixmesh.bench.workloads import Call, Workload
from radixmesh.client import AsyncClient, ClientError, Message, Usage
from radixmesh.client.protocol import answer_of


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it."""

    ttft_s: float
    itl_s: tuple[float, ...]
    """Between pieces of text; a piece may hold several tokens when the server sends them together."""
    e2e_s: float
    usage: Usage


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload; rates per second of wall time, percentiles over requests (`ttft`) or over gaps (`itl`)."""

    workload: str
    num_requests: int
    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    cached_share: float
    """Of all prompt tokens, those that came from the cache."""


async def run(client: AsyncClient, workload: Workload, on_answer: Callable[[], None]) -> tuple[list[Sample], float]:
    """All calls, `concurrency` at a time; the samples and the wall time in seconds. Raises ClientError at the first failure."""
    gate = asyncio.Semaphore(workload.concurrency)
    samples: list[Sample] = []

    async def converse(call: Call) -> None:
        async with gate:
            prompt = call.prompt
            for question in (*call.follow_ups, None):
                sample, text = await _ask(client, prompt, call)
                samples.append(sample)
                on_answer()
                if question is not None:
                    assert not isinstance(prompt, str), "only chats go on"
                    said: list[Message] = [
                        {"role": "assistant", "content": text},
                        {"role": "user", "content": question},
                    ]
                    prompt = [*prompt, *said]

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in workload.calls:
                tasks.create_task(converse(call))
    except* ClientError as failures:
        raise failures.exceptions[0] from None
    return samples, time.perf_counter() - started


async def _ask(client: AsyncClient, prompt: str | list[Message], call: Call) -> tuple[Sample, str]:
    chunks, times = [], []
    started = time.perf_counter()
    async for chunk in client.stream(prompt, **call.params):
        chunks.append(chunk)
        if chunk.text:
            times.append(time.perf_counter())
    ended = time.perf_counter()
    answer = answer_of(chunks)
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(times))
    first = times[0] if times else ended
    return Sample(first - started, gaps, ended - started, answer.usage), answer.text


def summarise(workload: Workload, samples: list[Sample], wall_s: float) -> Summary:
    ttft = [sample.ttft_s for sample in samples]
    itl = [gap for sample in samples for gap in sample.itl_s]
    prompt_tokens = sum(sample.usage.prompt_tokens for sample in samples)
    return Summary(
        workload=workload.name,
        num_requests=len(samples),
        wall_s=wall_s,
        requests_per_s=len(samples) / wall_s,
        output_tokens_per_s=sum(sample.usage.completion_tokens for sample in samples) / wall_s,
        ttft_p50_s=percentile(ttft, 50),
        ttft_p99_s=percentile(ttft, 99),
        itl_p50_s=percentile(itl, 50),
        itl_p99_s=percentile(itl, 99),
        cached_share=sum(sample.usage.cached_tokens for sample in samples) / max(prompt_tokens, 1),
    )


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that so many per cent of all do not exceed; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(0, int(rank) - 1)]
