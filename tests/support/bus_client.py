"""Plays a gateway on the bus: submits token ids, collects token ids. For tests that compare tokens, not texts."""

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared import subjects
from shared.bus import Bus, Delivery
from shared.messages.cluster import Heartbeat, Load, ServiceState, unpack_load
from shared.messages.execution import Step, unpack_worker_inbox
from shared.messages.generation import (
    Abort,
    Accepted,
    CacheFlushed,
    FinishReason,
    FlushCache,
    Submit,
    unpack_cache_flushed,
    unpack_frame,
    unpack_submit_reply,
)
from shared.messages.packing import num_int32, pack, pack_int32, unpack_int32
from shared.messages.sampling import SamplingParams
from shared.nats_bus import BusConfig, NatsBus

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass
class Generated:
    replica_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Loop time of each token's arrival."""
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: str | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class BusClient:
    """`async with BusClient(url, model) as client: await client.generate(prompt, 16)`."""

    def __init__(self, nats_url: str, model: str) -> None:
        self.model = model
        self.gateway_id = f"client-{secrets.token_hex(4)}"
        self.loads: dict[str, Load] = {}
        self._nats_url = nats_url
        self._live: dict[str, Generated] = {}
        self._numbers = itertools.count()
        self._load_came = asyncio.Event()
        self._bus: Bus

    async def __aenter__(self) -> "BusClient":
        self._bus = await NatsBus.connect(BusConfig(url=self._nats_url), name=self.gateway_id)
        await self._bus.subscribe(subjects.gateway_frames(self.model, self.gateway_id), self._on_frame)
        await self._bus.subscribe(subjects.replica_load(self.model), self._on_load)
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._beating.cancel()
        await self._bus.close()

    async def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        namespace: str = "",
    ) -> tuple[str, Generated]:
        """Submit and return (request id, what comes). Raises AssertionError when it is refused."""
        request_id = f"{self.gateway_id}-{next(self._numbers)}"
        generated = self._live[request_id] = Generated()
        submit = Submit(
            request_id=request_id,
            gateway_id=self.gateway_id,
            prompt=pack_int32(prompt),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            namespace=namespace,
        )
        answer = await self._bus.request(subjects.router_submit(self.model), pack(submit), timeout_s=5)
        reply = unpack_submit_reply(answer)
        assert isinstance(reply, Accepted), reply
        generated.replica_id = reply.replica_id
        return request_id, generated

    async def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        namespace: str = "",
    ) -> Generated:
        _, generated = await self.submit(prompt, max_new_tokens, sampling, namespace)
        await generated.done.wait()
        assert generated.error is None, generated.error
        return generated

    async def abort(self, request_id: str) -> None:
        replica = self._live[request_id].replica_id
        await self._bus.publish(subjects.replica_requests(self.model, replica), pack(Abort(request_id=request_id)))

    async def flush(self) -> CacheFlushed:
        """Of the one replica there is."""
        (replica,) = self.loads
        subject = subjects.replica_requests(self.model, replica)
        return unpack_cache_flushed(await self._bus.request(subject, pack(FlushCache()), timeout_s=5))

    async def next_load(self) -> Load:
        """The next report of any replica: at most 100 ms away."""
        self._load_came.clear()
        await self._load_came.wait()
        return next(reversed(self.loads.values()))

    async def watch_steps(self) -> list[int]:
        """A list that grows by the number of rows of each step that the one replica there is sends from now on."""
        (replica,) = self.loads
        step_sizes: list[int] = []

        def on_step(delivery: Delivery) -> None:
            message = unpack_worker_inbox(delivery.payload)
            if isinstance(message, Step):
                step_sizes.append(num_int32(message.decode) + num_int32(message.extend) // 2)

        await self._bus.subscribe(subjects.replica_steps(self.model, replica), on_step)
        return step_sizes

    def _on_frame(self, delivery: Delivery) -> None:
        now = asyncio.get_running_loop().time()
        for emission in unpack_frame(delivery.payload).emissions:
            generated = self._live[emission.request_id]
            token_ids = unpack_int32(emission.token_ids)
            assert emission.position == len(generated.token_ids), "a token was lost or repeated"
            generated.token_ids += token_ids
            generated.times += [now] * len(token_ids)
            generated.cached_tokens = emission.cached_tokens
            if emission.finish is not None:
                assert generated.finish is None, "a request ends once"
                generated.finish = emission.finish
                generated.error = emission.error
                generated.done.set()

    def _on_load(self, delivery: Delivery) -> None:
        load = unpack_load(delivery.payload)
        self.loads.pop(load.replica_id, None)
        self.loads[load.replica_id] = load
        self._load_came.set()

    async def _beat(self) -> None:
        subject = subjects.heartbeat(self.model, "gateway", self.gateway_id)
        while True:
            heartbeat = Heartbeat(role="gateway", instance=self.gateway_id, state=ServiceState.READY)
            await self._bus.publish(subject, pack(heartbeat))
            await asyncio.sleep(0.5)
