"""The engine as its users see it: over HTTP, with the official client, many at a time, and with clients that leave."""

import asyncio
import json
import random
from typing import Any

import httpx
import openai
import pytest

from tests.support.bus_client import BusClient
from tests.support.prompts import questions
from tests.support.stack import Stack

pytestmark = pytest.mark.slow

QUESTION: dict[str, Any] = {"role": "user", "content": "What is the capital of France?"}
MAX_STEPS_TO_FORGET = 2
STAYING_TOKENS = 40


def chat(engine: Stack, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": engine.model, "messages": messages, "temperature": 0, **fields}
    response = httpx.post(f"{engine.base_url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_it_answers_paris_streamed_and_not(engine: Stack) -> None:
    whole = chat(engine, [QUESTION])["choices"][0]["message"]["content"]
    assert "Paris" in whole
    body = {"model": engine.model, "messages": [QUESTION], "temperature": 0, "stream": True}
    pieces = []
    url = f"{engine.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == whole


def test_turn_2_finds_the_whole_of_turn_1_in_the_cache(engine: Stack) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": "Name three rivers in Europe."}]
    first = chat(engine, history, max_tokens=60)
    history.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    history.append({"role": "user", "content": "And three in Asia?"})
    second = chat(engine, history, max_tokens=8)
    usage = first["usage"]
    # Of turn 1 only the end token was sampled and never computed.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= usage["total_tokens"] - 1


def test_the_same_prompt_twice_computes_one_token(engine: Stack) -> None:
    messages = [{"role": "user", "content": "Write one sentence about the moon."}]
    usages = [chat(engine, messages, max_tokens=4)["usage"] for _ in range(2)]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] == usages[1]["prompt_tokens"] - 1


def test_different_salts_never_share(engine: Stack) -> None:
    messages = [{"role": "user", "content": "Write one sentence about the sun."}]
    salts: list[dict[str, Any]] = [{"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}]
    cached = [
        chat(engine, messages, max_tokens=4, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in salts
    ]
    assert cached[0] == cached[1] == 0
    assert cached[2] > 0
    # Without a salt only the template's beginning, which other tests have cached, may be found.
    assert cached[3] < cached[2]


async def test_the_openai_client_works(engine: Stack) -> None:
    client = openai.AsyncOpenAI(base_url=f"{engine.base_url}/v1", api_key="none")
    models = await client.models.list()
    assert [model.id for model in models.data] == [engine.model]
    messages: Any = [QUESTION]
    stream = await client.chat.completions.create(
        model=engine.model, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert "Paris" in text
    assert usage is not None and usage.completion_tokens > 3
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="no-such-model", messages=messages)
    assert caught.value.code == "model_not_found"
    await client.close()


async def complete(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def client_of(engine: Stack) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=engine.base_url, timeout=300, trust_env=False, limits=limits)


async def test_64_streams_at_once_each_equal_their_solo_run(engine: Stack) -> None:
    prompts = questions()[:64]
    async with client_of(engine) as client:
        together = await asyncio.gather(*(complete(client, engine.model, prompt, 16) for prompt in prompts))
        alone = [await complete(client, engine.model, prompt, 16) for prompt in prompts]
    assert together == alone


async def test_streams_go_on_while_a_long_prompt_is_prefilled(engine: Stack) -> None:
    async with BusClient(engine.nats.url, engine.model) as client:
        running = [await client.submit(range(100 + i, 120 + i), 400) for i in range(8)]
        while not all(generated.token_ids for _, generated in running):
            await client.next_load()
        before = [len(generated.token_ids) for _, generated in running]
        long = await client.generate([(7 * i) % 40_000 + 50 for i in range(4000)], 1)
        assert len(long.token_ids) == 1
        received = [len(generated.token_ids) - n for (_, generated), n in zip(running, before, strict=True)]
        # 4,000 tokens are 8 chunks of at most 512 and each brings every stream a token.
        assert min(received) >= 8
        for request_id, _ in running:
            await client.abort(request_id)


async def test_clients_that_leave_take_nothing_with_them(engine: Stack) -> None:
    rng = random.Random(11)
    prompts = questions()[:40]
    async with client_of(engine) as client, BusClient(engine.nats.url, engine.model) as bus:
        expected = [await complete(client, engine.model, prompt, STAYING_TOKENS) for prompt in prompts[1::2]]
        await bus.next_load()
        step_sizes = await bus.watch_steps()

        async def leave(prompt: str) -> None:
            body = {"model": engine.model, "prompt": prompt, "max_tokens": 400, "stream": True, "ignore_eos": True}
            num_events = rng.randrange(0, 12)
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    num_events -= line.startswith("data: ")
                    if num_events <= 0:
                        return

        staying = [
            asyncio.create_task(complete(client, engine.model, prompt, STAYING_TOKENS)) for prompt in prompts[1::2]
        ]
        await asyncio.gather(*(leave(prompt) for prompt in prompts[0::2]))
        num_sent = len(step_sizes)
        assert not any(task.done() for task in staying), "they must still run, or rows say nothing about who has left"
        assert max(step_sizes) > len(staying), "those who left had rows"
        assert [await task for task in staying] == expected
        late = [index for index, num_rows in enumerate(step_sizes[num_sent:], 1) if num_rows > len(staying)]
        assert max(late, default=0) <= MAX_STEPS_TO_FORGET, f"steps {late} after the last had left had rows for them"
        load = await bus.next_load()
        while load.num_running_reqs or load.num_waiting_reqs:
            load = await bus.next_load()
        # All slots are free or in the tree: flushing it leaves none.
        assert load.num_used_slots == 0
        assert (await bus.flush()).num_kept_tokens == 0
