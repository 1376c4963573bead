"""A real gateway on a loopback port, and around it a mesh whose tokenizer, grammar service and scheduler follow a script.

The vocabulary is bytes: token id 0..255 is that byte, and three control tokens follow. So a test reads token ids as text.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.actor import GatewayActor, load_facts
from services.gateway.config import GatewayConfig
from services.gateway.text.vocabulary import bytes_of_byte_level
from shared import subjects
from shared.bus import Delivery
from shared.messages.cluster import Heartbeat, Load, ServiceState
from shared.messages.constraints import Compile, Compiled, CompileReply, Constraint, unpack_compile
from shared.messages.generation import (
    Accepted,
    CacheFlushed,
    Emission,
    FinishReason,
    FlushCache,
    Frame,
    Rejected,
    ReplicaInbox,
    Submit,
    unpack_replica_inbox,
)
from shared.messages.packing import pack, pack_int32, unpack_int32
from shared.messages.tokenization import (
    Detokenize,
    Detokenized,
    EncodeChat,
    Encoded,
    EncodeReply,
    EncodeRequest,
    EncodeText,
    unpack_encode_request,
)
from tests.support.memory_bus import MemoryBroker, MemoryBus

M = TypeVar("M", bound=ReplicaInbox)

MODEL = "bytes-1"
END, START, STOP = 256, 257, 258
VOCAB_SIZE = 260
CONTEXT_LEN = 512


def byte_tokenizer_json() -> str:
    """A byte-level tokenizer without merges, whose id of a byte is the byte."""
    letters = {bytes_of_byte_level(letter)[0]: letter for letter in pre_tokenizers.ByteLevel.alphabet()}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<|end|>", "<|start|>", "<|stop|>")])
    return str(tokenizer.to_str())


def write_model_folder(folder: Path, **generation_config: float) -> Path:
    """What the gateway reads of a model."""
    config = {"model_type": "llama", "max_position_embeddings": CONTEXT_LEN, "vocab_size": VOCAB_SIZE}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    return folder


def ids(text: str) -> list[int]:
    return list(text.encode())


Answer = Callable[[Submit], Sequence[Emission] | Rejected | None]
"""What the scheduler does with a Submit: emissions, sent one frame each; a refusal; or nothing but Accepted."""


def says(text: str, *, finish: FinishReason = FinishReason.STOP, cached_tokens: int = 0) -> Answer:
    """Generate `text`, a token a frame; STOP comes as an end token."""

    def answer(submit: Submit) -> list[Emission]:
        return emissions(submit, ids(text), finish=finish, cached_tokens=cached_tokens)

    return answer


def emissions(
    submit: Submit, tokens: Sequence[int], *, finish: FinishReason | None, cached_tokens: int = 0
) -> list[Emission]:
    """One emission a token. Within the request's limit: a text that is longer ends with LENGTH."""
    if finish is FinishReason.STOP:
        tokens = [*tokens, END]
    if len(tokens) > submit.max_new_tokens:
        tokens, finish = tokens[: submit.max_new_tokens], FinishReason.LENGTH
    if not tokens:
        return [Emission(request_id=submit.request_id, position=0, token_ids=b"", finish=finish)]
    last = len(tokens) - 1
    return [
        Emission(
            request_id=submit.request_id,
            position=position,
            token_ids=pack_int32([token]),
            finish=finish if position == last else None,
            stop_token=token if position == last and finish is FinishReason.STOP else None,
            cached_tokens=cached_tokens,
        )
        for position, token in enumerate(tokens)
    ]


class Mesh:
    """The other services. What they were told is in `submits` and `told`; what they answer is in the attributes."""

    def __init__(self, bus: MemoryBus, replica_id: str = "replica-1") -> None:
        self.bus = bus
        self.replica_id = replica_id
        self.answer: Answer = says("ok")
        self.compile: Callable[[Constraint], CompileReply] = lambda constraint: Compiled(grammar="grammar")
        self.encode: Callable[[EncodeRequest], EncodeReply] = encode
        self.load = Load(
            replica_id=replica_id,
            epoch=1,
            num_running_reqs=0,
            num_waiting_reqs=0,
            num_uncached_tokens=0,
            num_used_slots=0,
            num_cached_slots=0,
            num_slots=4096,
            accepting=True,
            max_total_tokens=CONTEXT_LEN,
        )
        self.submits: list[Submit] = []
        self.told: list[ReplicaInbox] = []
        self.encoded: list[EncodeRequest] = []
        self.compiled: list[Compile] = []
        self.is_silent = False
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        bus = self.bus
        await bus.subscribe(subjects.tokenizer_encode(MODEL), self._on_encode, queue="tokenizer")
        await bus.subscribe(subjects.grammar_compile(MODEL), self._on_compile, queue="grammar")
        await bus.subscribe(subjects.router_submit(MODEL), self._on_submit, queue="router")
        await bus.subscribe(subjects.replica_requests(MODEL, self.replica_id), self._on_told)
        await self.beat()

    async def beat(self) -> None:
        """Say once that everybody is there."""
        for role in ("tokenizer", "router"):
            heartbeat = Heartbeat(role=role, instance=f"{role}-1", state=ServiceState.READY)
            await self.bus.publish(subjects.heartbeat(MODEL, role, f"{role}-1"), pack(heartbeat))
        await self.bus.publish(subjects.replica_load(MODEL, self.replica_id), pack(self.load))

    async def beat_forever(self) -> None:
        while True:
            if not self.is_silent:
                await self.beat()
            await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until what was heard fulfils the condition."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_submitted(self, count: int = 1) -> Submit:
        await self.until(lambda: len(self.submits) >= count)
        return self.submits[count - 1]

    async def until_told(self, kind: type[M]) -> M:
        """Wait for a message of that kind on the replica's subject; the first one."""
        await self.until(lambda: any(isinstance(message, kind) for message in self.told))
        return next(message for message in self.told if isinstance(message, kind))

    def emit(self, submit: Submit, *emitted: Emission) -> None:
        """Send emissions in one frame."""
        if emitted:
            frame = Frame(replica_id=self.replica_id, epoch=1, seq=1, emissions=tuple(emitted))
            self._publish(subjects.gateway_frames(MODEL, submit.gateway_id), pack(frame))

    def _on_encode(self, delivery: Delivery) -> None:
        request = unpack_encode_request(delivery.payload)
        self.encoded.append(request)
        self._publish(delivery.reply, pack(self.encode(request)))

    def _on_compile(self, delivery: Delivery) -> None:
        request = unpack_compile(delivery.payload)
        self.compiled.append(request)
        self._publish(delivery.reply, pack(self.compile(request.constraint)))

    def _on_submit(self, delivery: Delivery) -> None:
        submit = unpack_replica_inbox(delivery.payload)
        assert isinstance(submit, Submit)
        answer = self.answer(submit)
        if isinstance(answer, Rejected):
            self._publish(delivery.reply, pack(answer))
        else:
            self._publish(delivery.reply, pack(Accepted(replica_id=self.replica_id, epoch=1)))
            for emission in answer or ():
                self.emit(submit, emission)
        self.submits.append(submit)
        self._changed.set()

    def _on_told(self, delivery: Delivery) -> None:
        message = unpack_replica_inbox(delivery.payload)
        if isinstance(message, FlushCache):
            self._publish(delivery.reply, pack(CacheFlushed(num_freed_tokens=7, num_kept_tokens=3)))
        self.told.append(message)
        self._changed.set()

    def _publish(self, subject: str, payload: bytes) -> None:
        task = asyncio.ensure_future(self.bus.publish(subject, payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def encode(request: EncodeRequest) -> EncodeReply:
    """Texts as bytes; a chat as lines of role and content, and the name of the one who speaks next."""
    match request:
        case EncodeText(texts=texts):
            return Encoded(prompts=tuple(pack_int32(ids(text)) for text in texts))
        case EncodeChat(messages=messages):
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
            return Encoded(prompts=(pack_int32(ids("".join([*lines, "assistant: "]))),))
        case Detokenize(token_ids=token_ids):
            return Detokenized(text=bytes(unpack_int32(token_ids)).decode("utf-8", "replace"))


class World:
    """A running gateway, a client of it, and the mesh that it talks to."""

    def __init__(self, actor: GatewayActor, mesh: Mesh, client: httpx.AsyncClient, bus: MemoryBus) -> None:
        self.actor = actor
        self.gateway = actor.gateway
        self.mesh = mesh
        self.client = client
        self.bus = bus
        """The gateway's own connection."""

    async def until_accepted(self) -> None:
        """Wait until a replica has everything that was submitted."""
        flights = self.gateway.mesh._flights
        await eventually(lambda: flights and all(flight.replica_id is not None for flight in flights.values()))

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": MODEL} | body)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", **{"prompt": "hi", "max_tokens": 100} | body)

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}]} | body)

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a streamed answer, "[DONE]" included; comments are left out."""
        async with self.client.stream("POST", path, json={"model": MODEL, "stream": True} | body) as response:
            assert response.status_code == 200, await response.aread()
            blocks = (await response.aread()).decode().split("\n\n")
        data = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    async def stream_completion(self, **body: Any) -> list[Any]:
        return await self.stream("/v1/completions", **{"prompt": "hi", "max_tokens": 100} | body)

    async def stream_chat(self, **body: Any) -> list[Any]:
        return await self.stream("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}]} | body)


@asynccontextmanager
async def gateway_world(folder: Path, *, ready: bool = True, **settings: Any) -> AsyncIterator[World]:
    """Start it all on a memory bus. `settings` are the gateway's."""
    broker = MemoryBroker()
    bus, mesh = MemoryBus(broker), Mesh(MemoryBus(broker))
    defaults = {"model": MODEL, "model_path": str(write_model_folder(folder)), "port": 0, "instance": "gw"}
    config = GatewayConfig(**defaults | settings)
    facts, tool_parser = load_facts(config)
    actor = GatewayActor(config, facts, tool_parser, bus)
    running = asyncio.create_task(actor.run())
    beating = asyncio.create_task(mesh.beat_forever())
    try:
        await mesh.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{actor.port}", timeout=20, trust_env=False) as client:
            if ready:
                await _until_ready(client)
            yield World(actor, mesh, client, bus)
        assert not broker.errors, broker.errors
    finally:
        await actor.drain(1.0)
        for task in (running, beating):
            task.cancel()
        await asyncio.gather(running, beating, return_exceptions=True)


async def _until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(5):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110  # asked for, as a probe does
            await asyncio.sleep(0.01)


async def eventually(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Wait until something holds inside of the gateway that nobody announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
