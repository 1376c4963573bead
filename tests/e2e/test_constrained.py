"""Constrained output through the whole engine: valid whatever is asked beside it, and the same with and without jump-forward."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.bus_client import BusClient
from tests.support.default_model import default_model_folder
from tests.support.schemas import draw_schemas, is_valid
from tests.support.stack import Stack, free_port

pytestmark = pytest.mark.slow

NUM_SCHEMAS = int(os.environ.get("RADIXMESH_NUM_SCHEMAS", "60"))
"""Random schemas, one generation each; `RADIXMESH_NUM_SCHEMAS=500` for a thorough run."""
MAX_TOKENS = 160

PROFILE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["administrator", "assistant", "user"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "profile", "schema": PROFILE, "strict": True}}
COMMON: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Invent a user profile as JSON."}],
    "temperature": 0,
}


@asynccontextmanager
async def client_of(stack: Stack, port: int = 0) -> AsyncIterator[httpx.AsyncClient]:
    base_url = f"http://127.0.0.1:{port}" if port else stack.base_url
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=120, trust_env=False, limits=limits) as client:
        yield client


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={**COMMON, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def streamed(client: httpx.AsyncClient, **fields: Any) -> tuple[str, str, list[Any]]:
    """(content, finish_reason, logprobs of all tokens) of a streamed chat."""
    text, finish = "", ""
    scores: list[Any] = []
    body = {**COMMON, "stream": True, **fields}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
                scores += (choice.get("logprobs") or {}).get("content") or []
    return text, finish, scores


# ---------------------------------------------------------------- validity


async def test_documents_for_random_schemas_are_valid_or_honestly_cut_off(engine: Stack) -> None:
    gate = asyncio.Semaphore(24)
    outcomes: dict[str, int] = {"stop": 0, "length": 0, "refused": 0}

    async def generate(client: httpx.AsyncClient, number: int, schema: dict[str, Any]) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        content = f"Write JSON for this schema: {json.dumps(schema)[:500]}"
        body = {
            "model": engine.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 1,
            "top_p": 1,
            "seed": number,
            "max_tokens": MAX_TOKENS,
            "response_format": form,
        }
        async with gate:
            response = await client.post("/v1/chat/completions", json=body)
        if response.status_code == 400:
            assert response.json()["error"]["param"] == "response_format", response.text
            outcomes["refused"] += 1
            return
        assert response.status_code == 200, (schema, response.text)
        choice = response.json()["choices"][0]
        outcomes[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "stop":
            assert is_valid(schema, json.loads(choice["message"]["content"])), (schema, choice)

    async with client_of(engine) as client:
        schemas = draw_schemas(2 * NUM_SCHEMAS, seed=4)
        # Some are refused, by name; others take their place.
        while outcomes["stop"] + outcomes["length"] < NUM_SCHEMAS:
            num_wanted = NUM_SCHEMAS - outcomes["stop"] - outcomes["length"]
            batch, schemas = schemas[:num_wanted], schemas[num_wanted:]
            assert batch, outcomes
            await asyncio.gather(*(generate(client, len(schemas) + i, schema) for i, schema in enumerate(batch)))
    print(outcomes)
    assert outcomes["stop"] > NUM_SCHEMAS // 2


async def test_truncation_is_a_length(engine: Stack) -> None:
    async with client_of(engine) as client:
        whole = (await chat(client, response_format=FORM))["choices"][0]["message"]["content"]
        for max_tokens in (1, 2, 3, 5, 8, 13, 21):
            answer = await chat(client, response_format=FORM, max_tokens=max_tokens)
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == max_tokens
            assert whole.startswith(choice["message"]["content"] or "")


async def test_choices_of_one_request_are_those_of_requests_alone(engine: Stack) -> None:
    async with client_of(engine) as client:
        drawn = {"response_format": FORM, "temperature": 1, "max_tokens": MAX_TOKENS}
        together = await chat(client, **drawn, n=4, seed=7)
        alone = [await chat(client, **drawn, seed=7 + i) for i in range(4)]
    texts = [choice["message"]["content"] for choice in together["choices"]]
    assert texts == [answer["choices"][0]["message"]["content"] for answer in alone]
    assert len(set(texts)) == 4
    for choice in together["choices"]:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), PROFILE)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["CET", "UTC"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, TIME)}  # type: ignore[index]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("fields", "names", "max_calls"),
    [
        ({"tool_choice": "required"}, {"get_weather", "get_time"}, 32),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"get_weather", "get_time"}, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "get_time"}}}, {"get_time"}, 1),
    ],
)
async def test_forced_calls_are_calls_of_the_tools_offered(
    engine: Stack, fields: dict[str, Any], names: set[str], max_calls: int, temperature: float
) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris and Rome, and what time is it?"}]
    async with client_of(engine) as client:
        common = {"messages": messages, "tools": [WEATHER, TIME], "temperature": temperature, "seed": 3, **fields}
        choice = (await chat(client, **common, max_tokens=300))["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert not choice["message"]["content"]
    assert 1 <= len(calls) <= max_calls
    complete = calls if choice["finish_reason"] != "length" else calls[:-1]
    for call in complete:
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS[call["function"]["name"]])


# ---------------------------------------------------------------- jump-forward


@pytest.fixture(scope="module")
def sampling_engine() -> Iterator[Stack]:
    """Every token is sampled; and so few slots that requests are retracted."""
    with Stack(model_path=str(default_model_folder())) as stack:
        stack.start_all(
            "--dtype", "float32", "--num-slots", "260", "--no-jump-forward", scheduler_flags=("--reserve-slots", "2")
        )
        yield stack


VARIANTS: list[dict[str, Any]] = [
    {"response_format": FORM},
    {"response_format": FORM, "temperature": 1, "seed": 7},
    {"response_format": FORM, "max_tokens": 17},
    {"response_format": FORM, "stop": ["role"]},
    {"response_format": FORM, "stop": ['", "'], "min_tokens": 12},
    {"response_format": FORM, "logprobs": True, "top_logprobs": 2},
    {"response_format": FORM, "logprobs": True, "stop": ["age"]},
    {"regex": r"The capital of France is Paris, and its population is \d\d? million people\."},
    {"choice": ["certainly not", "certainly", "perhaps"]},
    {"ebnf": 'root ::= "A list of numbers: " number (", " number){3}\nnumber ::= [1-9] [0-9]?'},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=[",".join(variant) for variant in VARIANTS])
async def test_jumping_ahead_changes_nothing_that_a_client_sees(
    engine: Stack, sampling_engine: Stack, fields: dict[str, Any]
) -> None:
    async with client_of(engine) as client, client_of(sampling_engine) as sampling_client:
        jumped = await chat(client, **fields)
        sampled = await chat(sampling_client, **fields)
        text, finish, scores = await streamed(client, **fields)
    choice, other = jumped["choices"][0], sampled["choices"][0]
    assert choice["message"] == other["message"]
    assert choice["finish_reason"] == other["finish_reason"]
    assert jumped["usage"]["completion_tokens"] == sampled["usage"]["completion_tokens"]
    assert (text, finish) == (choice["message"]["content"], choice["finish_reason"])
    if "logprobs" in fields:
        content, expected = choice["logprobs"]["content"], other["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [entry["token"] for entry in expected]
        assert [entry["logprob"] for entry in content] == pytest.approx([e["logprob"] for e in expected], abs=1e-3)
        assert [entry["token"] for entry in scores] == [entry["token"] for entry in content]


@pytest.mark.parametrize("regex", ["[0-9]{3}", "[0-9] of course"])
async def test_a_turn_after_a_forced_ending_reads_the_cache_as_if_it_were_computed_anew(
    engine: Stack, regex: str
) -> None:
    """The last tokens of such a text have not been through the model: the cache must not say so."""
    async with client_of(engine) as client:
        first = await chat(client, regex=regex, cache_salt=f"warm {regex}")
        said = first["choices"][0]["message"]
        assert first["choices"][0]["finish_reason"] == "stop"
        messages = [*COMMON["messages"], said, {"role": "user", "content": "Are you sure?"}]
        fields = {"messages": messages, "max_tokens": 16, "logprobs": True}
        warm, cold = [await chat(client, **fields, cache_salt=f"{salt} {regex}") for salt in ("warm", "cold")]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["choices"][0]["message"] == cold["choices"][0]["message"]
    scores = [[entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] for answer in (warm, cold)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


async def test_a_retracted_request_follows_its_grammar_on(sampling_engine: Stack) -> None:
    """In a pool that has no room for all of them at once, each says what it says alone."""
    asked = [{"response_format": FORM, "temperature": 1, "seed": seed, "max_tokens": 80} for seed in range(8)]
    async with client_of(sampling_engine) as client:
        alone = [await chat(client, **fields) for fields in asked]
        together = await asyncio.gather(*(chat(client, **fields) for fields in asked))
        async with BusClient(sampling_engine.nats.url, sampling_engine.model) as bus:
            load = await bus.next_load()
    assert load.num_retracted_reqs > 0
    assert [answer["choices"] for answer in together] == [answer["choices"] for answer in alone]


# ---------------------------------------------------------------- thinking


FRUIT = {
    "type": "object",
    "properties": {"fruit": {"type": "string", "maxLength": 12}, "sweet": {"type": "boolean"}},
    "required": ["fruit", "sweet"],
    "additionalProperties": False,
}


def example(fruit: str, colour: str) -> list[dict[str, str]]:
    thought = f"<think>\nA {colour} fruit is the {fruit}.\n</think>\n\n"
    answer = json.dumps({"fruit": fruit, "sweet": True})
    return [
        {"role": "user", "content": f"Name a {colour} fruit."},
        {"role": "assistant", "content": thought + answer},
    ]


@pytest.fixture
async def thinking_client(engine: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A second gateway, which tells thinking from answers."""
    port = free_port()
    flags = ("--host", "127.0.0.1", "--port", str(port), "--reasoning-parser", "think")
    gateway = engine.start("thinking-gateway", *flags, module="services.gateway")
    try:
        async with client_of(engine, port) as client:
            await until_ready(client)
            yield client
    finally:
        engine.services.pop("thinking-gateway")
        gateway.stop()


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            await asyncio.sleep(0.1)


async def test_a_model_thinks_freely_and_answers_by_the_grammar(thinking_client: httpx.AsyncClient) -> None:
    """It is shown how, and so begins to think of its own accord."""
    shown = [*example("cherry", "red"), *example("banana", "yellow"), *example("plum", "blue")]
    messages = [*shown, {"role": "user", "content": "Name a green fruit."}]
    form = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": FRUIT}}
    fields = {"messages": messages, "response_format": form, "max_tokens": 200}
    message = (await chat(thinking_client, **fields))["choices"][0]["message"]
    assert "fruit" in message["reasoning_content"]
    jsonschema.validate(json.loads(message["content"]), FRUIT)
    text, finish, _ = await streamed(thinking_client, **fields)
    assert (text, finish) == (message["content"], "stop")
    # Not told apart, the thinking is part of the answer, and so the grammar leaves no room for it.
    whole = (await chat(thinking_client, **fields, separate_reasoning=False))["choices"][0]["message"]
    jsonschema.validate(json.loads(whole["content"]), FRUIT)
