"""What constrained output costs a client: `python -m benchmarks.constrained_serving`.

Starts a whole server, or measures a running one (`--base-url`), over HTTP with streamed answers. Requests ask for a JSON document
that fits a schema; beside them, in turn, the same prompts generate free text of exactly as many tokens (`ignore_eos`), neither
finding anything in the cache. Printed are finished requests per second at each width and their ratio, what a grammar costs that
nobody has asked for before, what a mask costs, and the time of a step in which 64 rows follow 64 different grammars.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.constrained import matcher_costs
from benchmarks.machine import default_model, describe_machine
from radixmesh.bench.workloads import PROFILE_SCHEMA
from tests.support.stack import Stack

WIDTHS = (1, 8)
REQUESTS_PER_WIDTH = 4
MAX_TOKENS = 200
NUM_GRAMMARS = 64
NOTE_TOKENS = 64
NUM_NEW_GRAMMARS = 12
TIMEOUT_S = 600.0


def note_schema(number: int) -> dict[str, Any]:
    """Schemas that differ in their key, and force nothing for a long time once the string has begun."""
    key = f"note_{number}"
    properties = {key: {"type": "string", "minLength": 8 * NOTE_TOKENS}}
    return {"type": "object", "properties": properties, "required": [key], "additionalProperties": False}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@dataclass(frozen=True)
class Answer:
    """chunk_s: when each piece of the stream arrived."""

    text: str
    num_tokens: int
    chunk_s: list[float]


class Client:
    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def ask(self, prompt: str, **fields: Any) -> Answer:
        """One streamed answer; parsed only when it is complete, so that reading costs little."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        chunks, chunk_s = [], []
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for chunk in response.aiter_raw():
                chunks.append(chunk)
                chunk_s.append(time.perf_counter())
        lines = b"".join(chunks).decode().split("\n")
        if response.status_code != httpx.codes.OK:
            raise SystemExit(f"HTTP {response.status_code}: {lines[0][:500]}")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        return Answer(text, events[-1]["usage"]["completion_tokens"], chunk_s)

    async def ask_all(self, requests: Sequence[dict[str, Any]], width: int) -> tuple[float, list[Answer]]:
        """(seconds, answers) of all requests, `width` of them at a time."""
        gate = asyncio.Semaphore(width)

        async def ask(request: dict[str, Any]) -> Answer:
            async with gate:
                return await self.ask(**request)

        started_s = time.perf_counter()
        answers = await asyncio.gather(*(ask(request) for request in requests))
        return time.perf_counter() - started_s, answers


async def compare_rates(client: Client, width: int, rounds: int) -> None:
    """Requests per second with a schema, and of free text as long."""
    ratios, rates, free_rates, num_tokens, num_complete = [], [], [], 0, 0
    num_requests = REQUESTS_PER_WIDTH * width
    for _ in range(rounds):
        salt = secrets.token_hex(4)
        prompts = [f"[{salt}-{i}] Invent a user profile as JSON." for i in range(num_requests)]
        constrained = [
            {"prompt": p, "max_tokens": MAX_TOKENS, "response_format": form(PROFILE_SCHEMA), "cache_salt": "a"}
            for p in prompts
        ]
        seconds, answers = await client.ask_all(constrained, width)
        free = [
            {"prompt": p, "max_tokens": answer.num_tokens, "ignore_eos": True, "cache_salt": "b"}
            for p, answer in zip(prompts, answers, strict=True)
        ]
        free_s, free_answers = await client.ask_all(free, width)
        num_round = sum(answer.num_tokens for answer in answers)
        assert num_round == sum(answer.num_tokens for answer in free_answers), "free text must be as long"
        num_tokens += num_round
        num_complete += sum(answer.num_tokens < MAX_TOKENS for answer in answers)
        rates.append(num_requests / seconds)
        free_rates.append(num_requests / free_s)
        ratios.append(free_s / seconds)
    print(
        f"json-{width}: {statistics.median(rates):6.2f} requests/s, free text {statistics.median(free_rates):6.2f}; "
        f"ratio {statistics.median(ratios):.2f} (rounds {', '.join(f'{r:.2f}' for r in ratios)}); "
        f"{num_tokens / (rounds * num_requests):.0f} tokens a request, {num_complete} of {rounds * num_requests} complete"
    )


async def measure_new_grammars(client: Client) -> None:
    """A request for one token with a schema never seen, and with the same schema again."""
    new_s: list[float] = []
    known_s: list[float] = []
    for _ in range(NUM_NEW_GRAMMARS):
        number = int(secrets.token_hex(4), 16)
        properties = {**PROFILE_SCHEMA["properties"], f"extra_{number}": {"type": "integer"}}
        request = {"max_tokens": 1, "response_format": form({**PROFILE_SCHEMA, "properties": properties})}
        for seconds in (new_s, known_s):
            started_s = time.perf_counter()
            await client.ask(f"[{number}] A profile.", **request)
            seconds.append(time.perf_counter() - started_s)
    print(
        f"request for one token: {statistics.median(new_s) * 1e3:.1f} ms with a schema never seen,"
        f" {statistics.median(known_s) * 1e3:.1f} ms with the same again"
    )


async def compare_steps(client: Client, rounds: int) -> None:
    """Median gap between the pieces of 64 streams at once: each gets a token a step."""
    gaps: dict[str, list[float]] = {"grammars": [], "free": []}
    for _ in range(rounds):
        salt = secrets.token_hex(4)
        prompts = [f"[{salt}-{i}] Write a long note." for i in range(NUM_GRAMMARS)]
        common = {"max_tokens": NOTE_TOKENS, "ignore_eos": True}
        grammars = [
            {"prompt": p, **common, "response_format": form(note_schema(i)), "cache_salt": "a"}
            for i, p in enumerate(prompts)
        ]
        free = [{"prompt": p, **common, "cache_salt": "b"} for p in prompts]
        for name, requests in (("grammars", grammars), ("free", free)):
            _, answers = await client.ask_all(requests, NUM_GRAMMARS)
            gaps[name].append(statistics.median(gap for answer in answers for gap in _steady_gaps(answer)))
    step_ms, free_ms = (statistics.median(values) * 1e3 for values in gaps.values())
    print(
        f"{NUM_GRAMMARS} rows: {step_ms:.1f} ms a step with {NUM_GRAMMARS} grammars, {free_ms:.1f} ms without;"
        f" {100 * (step_ms / free_ms - 1):+.1f} %"
    )


def _steady_gaps(answer: Answer) -> list[float]:
    """Without the beginning, where other streams are still being admitted, and without the end."""
    times = answer.chunk_s[len(answer.chunk_s) // 4 : -4]
    return [after - before for before, after in pairwise(times)]


async def measure(base_url: str, rounds: int) -> None:
    limits = httpx.Limits(max_connections=NUM_GRAMMARS + 4)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        client = Client(http, model)
        await client.ask("Hello.", max_tokens=8, response_format=form(PROFILE_SCHEMA))
        await measure_new_grammars(client)
        for width in WIDTHS:
            await compare_rates(client, width, rounds)
        await compare_steps(client, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model; the default model when left out")
    parser.add_argument("--base-url", default="", help="server to measure; one is started when left out")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.model = args.model or default_model()
    print(describe_machine())
    matcher_costs(args.model, Tokenizer.from_file(f"{args.model}/tokenizer.json").get_vocab_size())
    with ExitStack() as cleanup:
        base_url = args.base_url
        if not base_url:
            stack = cleanup.enter_context(Stack(model_path=args.model))
            stack.start_all("--dtype", args.dtype)
            base_url = stack.base_url
        asyncio.run(measure(base_url, args.rounds))


if __name__ == "__main__":
    main()
