"""The tokenizer on a bus: answers, batches, refusals, draining."""

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from services.tokenizer.__main__ import build
from services.tokenizer.actor import TokenizerActor
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.control_tokens import GuardedTokenizer
from services.tokenizer.core import TokenizerCore
from shared import subjects
from shared.bus import NoResponders
from shared.config import StartupError
from shared.messages.cluster import ServiceState
from shared.messages.packing import pack, unpack_int32
from shared.messages.tokenization import (
    EncodeChat,
    Encoded,
    EncodeFailed,
    EncodeRefused,
    EncodeText,
    unpack_encode_reply,
)
from tests.support import chat_templates
from tests.support.memory_bus import MemoryBroker, MemoryBus
from tests.support.tokenizer_models import tokenizer_json

NONCE = "314159265358979323846264"
CORE = TokenizerCore(GuardedTokenizer(tokenizer_json("byte_level"), NONCE), ChatTemplate(chat_templates.CHATML), NONCE)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never became true")


@asynccontextmanager
async def running(actor):
    task = asyncio.create_task(actor.run())
    await until(lambda: actor.state is ServiceState.READY)
    try:
        yield actor
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def actor_on(broker: MemoryBroker, **settings) -> TokenizerActor:
    return TokenizerActor(TokenizerConfig(instance="t", **settings), CORE, MemoryBus(broker))


async def ask(bus: MemoryBus, request: object):
    payload = request if isinstance(request, bytes) else pack(request)
    return unpack_encode_reply(
        await bus.request(subjects.tokenizer_encode("smollm2-135m-instruct"), payload, timeout_s=5.0)
    )


async def test_texts_and_chats_are_answered():
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with running(actor_on(broker)):
        text, chat = await asyncio.gather(
            ask(bus, EncodeText(texts=("Hello",))), ask(bus, EncodeChat(messages=({"role": "user", "content": "Hi"},)))
        )
    assert isinstance(text, Encoded) and isinstance(chat, Encoded)
    assert len(unpack_int32(chat.prompts[0])) > 4


async def test_requests_that_wait_together_each_get_their_own_answer():
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    texts = [f"text {number} " * (number % 7) for number in range(100)]
    async with running(actor_on(broker, max_batch_bytes=200)) as actor:
        replies = await asyncio.gather(*(ask(bus, EncodeText(texts=(text,))) for text in texts))
        assert actor.stats["num_answered"] == 100
    for text, reply in zip(texts, replies, strict=True):
        assert CORE.answer([EncodeText(texts=(text,))]) == [reply]


async def test_one_more_than_may_wait_is_refused_at_once():
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with running(actor_on(broker, max_waiting=1, num_threads=1, max_batch_bytes=1)):
        replies = await asyncio.gather(*(ask(bus, EncodeText(texts=("word " * 2000,))) for _ in range(50)))
    refused = [reply for reply in replies if isinstance(reply, EncodeRefused)]
    assert refused and "limit is 1" in refused[0].message
    assert any(isinstance(reply, Encoded) for reply in replies)


async def test_what_is_no_request_is_answered_too():
    broker = MemoryBroker()
    async with running(actor_on(broker)):
        reply = await ask(MemoryBus(broker), b"\xc1")
    assert isinstance(reply, EncodeFailed)


async def test_an_answer_too_large_for_the_bus_is_the_clients_mistake():
    broker = MemoryBroker(max_payload=2000)
    async with running(actor_on(broker)):
        reply = await ask(MemoryBus(broker), EncodeText(texts=("q z " * 400,)))
    assert isinstance(reply, EncodeFailed) and "2000" in reply.message


async def test_draining_answers_what_was_received_and_takes_no_more():
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with running(actor_on(broker, num_threads=1)) as actor:
        asking = [asyncio.create_task(ask(bus, EncodeText(texts=("word " * 1000,)))) for _ in range(5)]
        await until(lambda: actor.stats["num_waiting"] > 0)
        await actor.drain(5.0)
        assert all(isinstance(reply, Encoded) for reply in await asyncio.gather(*asking))
        with pytest.raises(NoResponders):
            await ask(bus, EncodeText(texts=("late",)))


async def test_a_folder_without_a_tokenizer_stops_the_start_with_a_reason(tmp_path):
    bus = MemoryBus(MemoryBroker())
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        await build(TokenizerConfig(model_path=str(tmp_path), instance="t"), bus)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json("byte_level"), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}), encoding="utf-8")
    with pytest.raises(StartupError, match="chat template"):
        await build(TokenizerConfig(model_path=str(tmp_path), instance="t"), bus)


async def test_a_folder_with_a_tokenizer_starts(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json("byte_level"), encoding="utf-8")
    broker = MemoryBroker()
    async with running(await build(TokenizerConfig(model_path=str(tmp_path), instance="t"), MemoryBus(broker))):
        assert isinstance(await ask(MemoryBus(broker), EncodeText(texts=("Hello",))), Encoded)
