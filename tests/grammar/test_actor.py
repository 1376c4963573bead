"""The grammar service as its clients see it: every constraint is answered in time, and a hostile one costs only itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from services.grammar.actor import GrammarActor
from services.grammar.config import GrammarConfig
from shared import subjects
from shared.config import StartupError
from shared.messages.constraints import (
    Choice,
    Compile,
    Compiled,
    ConstraintRefused,
    Ebnf,
    JsonObject,
    JsonSchema,
    Regex,
    unpack_compile_reply,
)
from shared.messages.packing import pack
from tests.support.memory_bus import MemoryBroker, MemoryBus

HOSTILE = JsonSchema(schema={"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(30)]})
"""Thirty searches at once: their product automaton has no end in practice."""


class Client:
    def __init__(self, broker: MemoryBroker, config: GrammarConfig, actor: GrammarActor) -> None:
        self.bus = MemoryBus(broker)
        self.actor = actor
        self._subject = subjects.grammar_compile(config.model)

    async def ask(self, constraint) -> Compiled | ConstraintRefused:
        return await self.ask_raw(pack(Compile(constraint=constraint)))

    async def ask_raw(self, payload: bytes) -> Compiled | ConstraintRefused:
        return unpack_compile_reply(await self.bus.request(self._subject, payload, timeout_s=3.5))


@asynccontextmanager
async def serving(model_path, **settings) -> AsyncIterator[Client]:
    config = GrammarConfig(instance="g1", model_path=str(model_path), **settings)
    broker = MemoryBroker()
    actor = GrammarActor(config, MemoryBus(broker))
    running = asyncio.create_task(actor.run())
    try:
        while actor.state != "ready" and not running.done():
            await asyncio.wait([running], timeout=0.02)
        if running.done():
            running.result()
        yield Client(broker, config, actor)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, ExceptionGroup):
            await running
        assert broker.errors == []


async def test_a_constraint_is_compiled_or_refused(model_path):
    async with serving(model_path, num_processes=1) as client:
        assert isinstance(await client.ask(JsonObject()), Compiled)
        reply = await client.ask(Regex(pattern="["))
        assert isinstance(reply, ConstraintRefused)
        assert reply.retry_after_s is None


async def test_equal_constraints_are_compiled_once(model_path):
    async with serving(model_path, num_processes=1) as client:
        same = JsonSchema(schema={"type": "integer"})
        replies = await asyncio.gather(*(client.ask(same) for _ in range(20)))
        replies.append(await client.ask(same))
        assert len({reply.grammar for reply in replies}) == 1
        assert client.actor.stats["num_vetted"] == 1
        assert client.actor.stats["num_answered"] == 21


async def test_refusals_are_remembered_too(model_path):
    async with serving(model_path, num_processes=1) as client:
        assert await client.ask(Regex(pattern="(")) == await client.ask(Regex(pattern="("))
        assert client.actor.stats["num_vetted"] == 1


async def test_a_hostile_constraint_costs_one_process_and_nobody_else(model_path):
    async with serving(model_path, num_processes=2, vet_timeout_s=1.0) as client:
        hostile = asyncio.create_task(client.ask(HOSTILE))
        for i in range(5):
            assert isinstance(await client.ask(Choice(options=(str(i),))), Compiled)
        assert not hostile.done()
        reply = await hostile
        assert isinstance(reply, ConstraintRefused)
        assert "too complex" in reply.message
        assert await client.ask(HOSTILE) == reply  # at once: it is remembered for a while
        assert client.actor.stats["num_killed"] == 1
        # The one process was replaced: both are there again for two constraints at a time.
        replies = await asyncio.gather(*(client.ask(Choice(options=(f"n{i}",))) for i in range(4)))
        assert all(isinstance(reply, Compiled) for reply in replies)


def nested(depth: int) -> dict:
    schema: dict = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(keyword: str, depth: int) -> dict:
    """Each definition asks for the next one twice: 2^depth schemas when written out."""
    twice = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**twice, f"d{depth}": {"type": "object"}}, "$ref": "#/$defs/d0"}


BOMBS = {
    "nested quantifiers": Regex(pattern="(a{1000}){1000}"),
    "long quantifier": Regex(pattern="a{1000000}"),
    "catastrophic backtracking": Regex(pattern="((a+)+)+b"),
    "many searches": Regex(pattern="(.*a){25}"),
    "60,000 words": Regex(pattern="|".join(f"w{i}" for i in range(60_000))),
    "a million characters": Regex(pattern="a" * 2**20),
    "a schema of a million characters": JsonSchema(schema={"enum": [f"{i:0200d}" for i in range(5000)]}),
    "10,000 alternatives": JsonSchema(schema={"enum": list(range(10_000))}),
    "3,000 alternatives": JsonSchema(schema={"anyOf": [{"properties": {f"p{i}": nested(3)}} for i in range(3000)]}),
    "deep nesting": JsonSchema(schema=nested(60)),
    "doubling allOf": JsonSchema(schema=doubling("allOf", 60)),
    "doubling anyOf": JsonSchema(schema=doubling("anyOf", 60)),
    "long string": JsonSchema(schema={"type": "string", "maxLength": 2**40}),
    "long array": JsonSchema(schema={"type": "array", "items": nested(20), "minItems": 10**6}),
    "product of searches": HOSTILE,
    "ambiguous grammar": Ebnf(grammar='start: s\ns: s s | s s s | "a" | ""'),
    "endless rule": Ebnf(grammar="start: a\na: a a"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
async def test_every_bomb_is_answered_within_three_seconds(model_path, name):
    async with serving(model_path, num_processes=2) as client, asyncio.timeout(3.0):
        bomb = asyncio.create_task(client.ask(BOMBS[name]))
        assert isinstance(await client.ask(JsonObject()), Compiled)
        await bomb


async def test_memory_is_bounded(model_path):
    async with serving(model_path, num_processes=1, max_memory_mib=64, vet_timeout_s=20, answer_timeout_s=30) as client:
        reply = await client.ask(Regex(pattern="(a{1000}){1000}"))
        assert isinstance(reply, ConstraintRefused)
        assert client.actor.stats["num_killed"] == 1


async def test_while_every_process_is_taken_clients_are_told_to_come_back(model_path):
    async with serving(model_path, num_processes=1, vet_timeout_s=2.0, answer_timeout_s=0.3) as client:
        hostile = asyncio.create_task(client.ask(HOSTILE))
        await asyncio.wait([hostile], timeout=0.05)
        reply = await client.ask(Choice(options=("a",)))
        assert isinstance(reply, ConstraintRefused)
        assert reply.retry_after_s is not None
        await hostile


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 200_000, msgspec.msgpack.encode({"type": "compile"})])
async def test_what_is_no_request_is_answered_too(model_path, payload):
    async with serving(model_path, num_processes=1) as client:
        assert isinstance(await client.ask_raw(payload), ConstraintRefused)


async def test_size_is_limited_with_both_numbers(model_path):
    async with serving(model_path, num_processes=1) as client:
        reply = await client.ask(Regex(pattern="a" * 1_000_000))
        assert isinstance(reply, ConstraintRefused)
        assert "262144" in reply.message


async def test_draining_leaves_the_group_and_answers_what_was_asked(model_path):
    async with serving(model_path, num_processes=1) as client:
        asked = asyncio.create_task(client.ask(JsonObject()))
        await asyncio.wait([asked], timeout=0.01)
        await client.actor.drain(timeout_s=5)
        assert isinstance(await asked, Compiled)
        assert not [s for s in client.bus.broker.subscriptions if s.queue]


async def test_a_model_that_cannot_be_read_stops_the_start(tmp_path):
    with pytest.raises(ExceptionGroup) as caught:
        async with serving(tmp_path, num_processes=1):
            pass
    assert caught.group_contains(StartupError)
