"""OpenAI's own client finds everything where it expects it."""

import json

import openai
import pytest
from pydantic import BaseModel

from tests.support.gateway_world import MODEL, World, gateway_world, says

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def client_of(world: World, api_key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.client.base_url}/v1", api_key=api_key, max_retries=0)


async def test_chats_and_streams(world):
    world.mesh.answer = says("hello")
    async with client_of(world) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, extra_body={"top_k": 5})
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("hello", "stop")
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
        assert chunks[-1].usage.completion_tokens == 6


async def test_completions_and_models(world):
    world.mesh.answer = says(" world")
    async with client_of(world) as client:
        reply = await client.completions.create(model=MODEL, prompt="hello", max_tokens=20, echo=True)
        assert reply.choices[0].text == "hello world"
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_structured_answers_are_parsed(world):
    class Answer(BaseModel):
        value: int

    world.mesh.answer = says('{"value": 42}')
    async with client_of(world) as client:
        reply = await client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer)
        assert reply.choices[0].message.parsed == Answer(value=42)


async def test_the_streaming_helper_puts_tool_calls_together(world):
    world.mesh.answer = says('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    async with (
        client_of(world) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS, max_tokens=200) as stream,
    ):
        async for _ in stream:
            pass
        message = (await stream.get_final_completion()).choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 1}]


async def test_errors_become_its_exceptions(tmp_path):
    async with gateway_world(tmp_path, api_keys=("k",)) as world:
        async with client_of(world, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(world, "k") as client:
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.chat.completions.create(model="other", messages=MESSAGES)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
            assert caught.value.param == "temperature"
