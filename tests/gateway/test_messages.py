"""Anthropic's API, on the same way through as the others."""

import itertools
import json

import pytest

from shared.messages.constraints import JsonSchema, ToolCalls
from shared.messages.generation import FinishReason
from tests.support.gateway_world import MODEL, World, gateway_world, says

TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def body(**fields) -> dict:
    return {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}]} | fields


async def ask(world: World, **fields) -> dict:
    reply = await world.client.post("/v1/messages", json=body(**fields))
    assert reply.status_code == 200, reply.text
    return reply.json()


async def events_of(world: World, **fields) -> list[dict]:
    """The data of the events, each checked against its event line."""
    reply = await world.client.post("/v1/messages", json=body(stream=True, **fields))
    events = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_message_is_a_list_of_blocks(world):
    world.mesh.answer = says("hello", cached_tokens=5)
    message = await ask(world, system="be kind")
    assert message["content"] == [{"type": "text", "text": "hello"}]
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "end_turn")
    prompt = "system: be kind\nuser: hi\nassistant: "
    assert message["usage"] == {
        "input_tokens": len(prompt) - 5,
        "output_tokens": 6,
        "cache_read_input_tokens": 5,
        "cache_creation_input_tokens": 0,
    }


async def test_a_stream_opens_and_closes_each_block(world):
    world.mesh.answer = says("hey")
    events = await events_of(world)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == "hey"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 4


@pytest.mark.parametrize(
    ("answer", "fields", "reason", "sequence"),
    [
        (says("a STOP b"), {"stop_sequences": ["STOP"]}, "stop_sequence", "STOP"),
        (says("abc", finish=FinishReason.LENGTH), {}, "max_tokens", None),
        (says(CALL), {"tools": TOOLS}, "tool_use", None),
    ],
)
async def test_the_reason_for_the_end_is_told(world, answer, fields, reason, sequence):
    world.mesh.answer = answer
    message = await ask(world, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    events = await events_of(world, **fields)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_tool_uses_are_blocks_of_their_own(world):
    world.mesh.answer = says(f"Well.\n{CALL}\n{CALL}")
    message = await ask(world, tools=TOOLS)
    text, first, second = message["content"]
    assert text["text"].strip() == "Well."
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "add", {"a": 1})
    assert first["id"] != second["id"]
    events = await events_of(world, tools=TOOLS)
    blocks = {e["index"]: e["content_block"] for e in events if e["type"] == "content_block_start"}
    assert [block["type"] for block in blocks.values()] == ["text", "tool_use", "tool_use"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]
    for index in (1, 2):
        parts = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == index]
        assert json.loads("".join(part["partial_json"] for part in parts)) == {"a": 1}
    open_blocks = list(
        itertools.accumulate(
            {"content_block_start": 1, "content_block_stop": -1}.get(event["type"], 0) for event in events
        )
    )
    assert set(open_blocks) == {0, 1}


async def test_a_conversation_with_tools_becomes_messages(world):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "add", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and?"},
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
            ],
        },
    ]
    await ask(world, messages=turns, tools=TOOLS)
    request = world.mesh.encoded[-1]
    assert request.messages == (
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": "ok",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "user", "content": "and?"},
    )
    assert request.tools[0]["function"] == {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        ({"type": "any"}, "required", True),
        ({"type": "tool", "name": "add", "disable_parallel_tool_use": True}, "add", False),
        ({"type": "auto"}, None, None),
    ],
)
async def test_a_forced_tool_is_a_constraint(world, choice, mode, parallel):
    asked = []
    compile_ = world.mesh.compile
    world.mesh.compile = lambda constraint: (asked.append(constraint), compile_(constraint))[1]
    await ask(world, tools=TOOLS, tool_choice=choice)
    assert [(c.mode, c.parallel) for c in asked if isinstance(c, ToolCalls)] == ([(mode, parallel)] if mode else [])


async def test_a_schema_for_the_answer_is_a_constraint(world):
    asked = []
    compile_ = world.mesh.compile
    world.mesh.compile = lambda constraint: (asked.append(constraint), compile_(constraint))[1]
    await ask(world, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"})
    assert asked == [JsonSchema(schema={"type": "object"})]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"max_tokens": 0}, 400),
        ({"messages": []}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400),
        ({"tool_choice": {"type": "tool", "name": "nope"}, "tools": TOOLS}, 400),
        ({"tool_choice": {"type": "any"}}, 400),
        ({"model": "claude"}, 404),
    ],
)
async def test_errors_have_anthropics_form(world, fields, status):
    reply = await world.client.post("/v1/messages", json=body(**fields))
    assert reply.status_code == status
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


async def test_tokens_are_counted_without_generating(world):
    fields = body(system="s")
    reply = await world.client.post("/v1/messages/count_tokens", json=fields)
    assert reply.json() == {"input_tokens": len("system: s\nuser: hi\nassistant: ")}
    assert not world.mesh.submits


async def test_thinking_is_a_block_before_the_answer(tmp_path):
    async with gateway_world(tmp_path, reasoning_parser="think") as world:
        world.mesh.answer = says("<think>\nhm\n</think>\n\nyes")
        message = await ask(world)
        assert [(b["type"], b.get("thinking") or b.get("text")) for b in message["content"]] == [
            ("thinking", "hm"),
            ("text", "yes"),
        ]
        events = await events_of(world)
        kinds = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
        assert kinds == ["thinking", "text"]
