"""Clients that people have find here what they expect: the real model behind the real services, few tokens each."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.support.stack import Stack

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


class City(BaseModel):
    name: str = Field(max_length=12)
    is_capital: bool


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """These clients read the environment; the server is on the loopback."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


# -- openai


@pytest.fixture
def client(engine: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_chats_and_streams_the_same(engine: Stack, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": engine.model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_openai_asynchronously(engine: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{engine.base_url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(
            model=engine.model, prompt="The capital of France is", max_tokens=3, temperature=0, logprobs=1
        )
        assert "Paris" in whole.choices[0].text
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.tokens or ()) == 3
        stream = await client.completions.create(
            model=engine.model, prompt="The capital of France is", max_tokens=3, temperature=0, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
        assert [model.id async for model in client.models.list()] == [engine.model]


def test_openai_parses_into_pydantic_models(engine: Stack, client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=engine.model, messages=MESSAGES, response_format=City, max_tokens=60, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed, City)
    tool = openai.pydantic_function_tool(City)
    called = client.chat.completions.parse(
        model=engine.model, messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=80, temperature=0
    )
    calls = called.choices[0].message.tool_calls or []
    assert calls
    assert all(isinstance(call.function.parsed_arguments, City) for call in calls)


def test_openai_streams_tool_calls(engine: Stack, client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model=engine.model, messages=MESSAGES, tools=[TOOL], tool_choice=named, max_tokens=60, temperature=0
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls or []] == ["get_weather"]
    assert set(json.loads((message.tool_calls or [])[0].function.arguments)) == {"city"}


def test_openai_raises_its_own_exceptions(engine: Stack, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="unknown", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=engine.model, messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"


# -- anthropic


GREEDILY = {"temperature": 0}
"""The client no longer has a parameter for it."""


@pytest.fixture
def claude(engine: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=engine.base_url, api_key="none", max_retries=0) as made:
        yield made


def test_anthropic_messages_and_streams_the_same(engine: Stack, claude: anthropic.Anthropic) -> None:
    fields: Any = {
        "model": engine.model,
        "max_tokens": 12,
        "system": "You are terse.",
        "messages": MESSAGES,
        "extra_body": GREEDILY,
    }
    whole = claude.messages.create(**fields)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = claude.messages.count_tokens(model=engine.model, system=fields["system"], messages=MESSAGES)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_anthropic_uses_tools_streamed_and_not(engine: Stack, claude: anthropic.Anthropic) -> None:
    fields: Any = {
        "model": engine.model,
        "max_tokens": 60,
        "messages": MESSAGES,
        "extra_body": GREEDILY,
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    whole = claude.messages.create(**fields)
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert [(call.name, set(call.input)) for call in calls] == [("get_weather", {"city"})]
    assert whole.stop_reason == "tool_use"
    with claude.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [calls[0].input]
    # And the result goes back into the conversation.
    result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sunny"}
    answered = claude.messages.create(
        model=engine.model,
        max_tokens=4,
        tools=fields["tools"],
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": [block.model_dump() for block in whole.content]},  # type: ignore[list-item]
            {"role": "user", "content": [result]},  # type: ignore[list-item]
        ],
    )
    assert answered.usage.output_tokens <= 4


# -- those that sit on top of them


def test_litellm_completes_and_streams(engine: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches prices when it is imported
    with warnings.catch_warnings():
        # Its own models of answers are looser than pydantic likes when it copies them.
        warnings.filterwarnings("ignore", message="Pydantic serializer warnings", category=UserWarning)
        import litellm

        fields: dict[str, Any] = {
            "model": f"openai/{engine.model}",
            "api_base": f"{engine.base_url}/v1",
            "api_key": "none",
            "messages": MESSAGES,
            "max_tokens": 12,
            "temperature": 0,
        }
        whole = litellm.completion(**fields)
        pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**fields, stream=True)]
    assert "Paris" in whole.choices[0].message.content
    assert "".join(pieces) == whole.choices[0].message.content


def test_langchain_invokes_streams_and_structures(engine: Stack) -> None:
    model = ChatOpenAI(
        model=engine.model,
        base_url=f"{engine.base_url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )
    whole = model.invoke(QUESTION, stop=["."])
    assert "Paris" in whole.content
    assert "".join(str(chunk.content) for chunk in model.stream(QUESTION, stop=["."])) == whole.content
    assert isinstance(model.with_structured_output(City).invoke(QUESTION), City)
    called = model.bind_tools([TOOL], tool_choice="get_weather").invoke(QUESTION)
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]


# -- SGLang's documented calls of /generate


def generate(engine: Stack, **body: Any) -> Any:
    reply = httpx.post(f"{engine.base_url}/generate", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


GREEDY = {"temperature": 0, "max_new_tokens": 4}


def test_native_text_ids_and_batches_agree(engine: Stack) -> None:
    prompt = "The capital of France is"
    one = generate(engine, text=prompt, sampling_params=GREEDY)
    assert "Paris" in one["text"]
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    tokens = httpx.post(f"{engine.base_url}/tokenize", json={"prompt": prompt}, trust_env=False).json()["tokens"]
    assert one["meta_info"]["prompt_tokens"] == len(tokens)
    assert generate(engine, input_ids=tokens, sampling_params=GREEDY)["output_ids"] == one["output_ids"]
    batch = generate(
        engine,
        text=[prompt, prompt],
        sampling_params=[GREEDY, GREEDY | {"max_new_tokens": 2}],
        rid=["long", "short"],
    )
    assert [each["output_ids"] for each in batch] == [one["output_ids"], one["output_ids"][:2]]
    assert [each["meta_info"]["id"] for each in batch] == ["long", "short"]


def test_native_streams_are_read_as_sglangs_example_does(engine: Stack) -> None:
    body = {"text": "The capital of France is", "sampling_params": GREEDY, "stream": True}
    text, seen = "", 0
    with httpx.stream("POST", f"{engine.base_url}/generate", json=body, timeout=60, trust_env=False) as response:
        for line in response.iter_lines():
            if line.startswith("data:"):
                if line == "data: [DONE]":
                    break
                event = json.loads(line[len("data:") :])
                text += event["text"][seen:]
                seen = len(event["text"])
    assert text == generate(engine, text=body["text"], sampling_params=GREEDY)["text"]


def test_native_logprobs_cover_prompt_and_output(engine: Stack) -> None:
    meta = generate(
        engine,
        text="The capital of France is",
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    for chosen, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert chosen == top[0]  # greedy
        assert top[0][0] >= top[1][0]
