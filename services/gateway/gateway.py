"""What all connections of one gateway share: the model, the mesh, the requests that run, and the counters."""

import asyncio
import hashlib
import hmac
import itertools
from collections.abc import Sequence

from services.gateway.cluster_view import ClusterView
from services.gateway.config import GatewayConfig
from services.gateway.errors import ApiError, aborted, invalid, unavailable
from services.gateway.exchange import Exchange
from services.gateway.generation.plan import Plan
from services.gateway.lifeline import Lifeline
from services.gateway.mesh import Mesh
from services.gateway.metrics import Metrics
from services.gateway.model_facts import ModelFacts
from services.gateway.quotas import Quotas
from shared.bus import Bus

TICK_S = 0.25
"""How often running requests are looked after."""


class Gateway:
    """The registry of exchanges by rid; everything an HTTP endpoint needs."""

    def __init__(self, config: GatewayConfig, facts: ModelFacts, bus: Bus) -> None:
        self.config = config
        self.facts = facts
        self.view = ClusterView(config.replica_silence_s, config.stall_timeout_s)
        self.metrics = Metrics(config.model, lambda: self.view.replicas(self.now()))
        self.mesh = Mesh(config, bus, self.view)
        self.quotas = Quotas(config.max_requests_per_minute, config.max_tokens_per_minute)
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._exchanges: dict[Exchange, None] = {}
        """Those that run, oldest first."""
        self._by_rid: dict[str, Exchange] = {}
        self._serials = itertools.count(1)
        self._ticked_s: float | None = None

    @property
    def num_active(self) -> int:
        return len(self._exchanges)

    async def until_idle(self) -> None:
        """Wait until no request is running."""
        await self._idle.wait()

    @property
    def max_body_bytes(self) -> int:
        """Never more than the bus takes: what cannot be passed on is not read."""
        return min(self.config.max_body_bytes, self.mesh.max_payload)

    def why_not_ready(self) -> str | None:
        if self.is_draining:
            return "the gateway is shutting down"
        if not self.mesh.is_connected:
            return "the message bus is away"
        return self.view.why_not_ready(self.now())

    def key_of(self, token: str) -> str | None:
        """The configured key that `token` is, "" where none are configured, None for a wrong one."""
        if not self.config.api_keys:
            return ""
        # Every key is compared, in constant time: how long a refusal takes says nothing about the keys.
        found = [key for key in self.config.api_keys if hmac.compare_digest(key.encode(), token.encode())]
        return found[0] if found else None

    def open(self, plan: Plan, *, rids: Sequence[str], key: str, lifeline: Lifeline) -> Exchange:
        """Register a request under its rids until `close`. Raises ApiError."""
        if self.is_draining:
            raise unavailable("the gateway is shutting down", code="draining")
        if len(self._exchanges) >= self.config.max_active_requests:
            limit = self.config.max_active_requests
            raise unavailable(f"{len(self._exchanges)} requests are running, the limit is {limit}", code="queue_full")
        if (taken := next((rid for rid in rids if rid in self._by_rid), None)) is not None:
            raise invalid("rid", f"a request with the id {taken!r} is running already")
        num_choices = plan.num_prompts * plan.num_choices
        if num_choices > self.config.max_choices:
            problem = f"{plan.num_prompts} prompts times {plan.num_choices} are {num_choices} generations"
            raise invalid("n", f"{problem}, the limit is {self.config.max_choices}")
        exchange = Exchange(
            plan,
            rids=rids,
            key=key,
            namespace=_namespace(key, plan.cache_salt),
            serial=next(self._serials),
            facts=self.facts,
            config=self.config,
            mesh=self.mesh,
            view=self.view,
            metrics=self.metrics,
            lifeline=lifeline,
        )
        self._exchanges[exchange] = None
        self._by_rid.update(dict.fromkeys(rids, exchange))
        self._idle.clear()
        return exchange

    def close(self, exchange: Exchange, *, reason: str) -> None:
        """The client has its answer, or will never have it: stop what still runs."""
        exchange.close(reason)
        del self._exchanges[exchange]
        for rid in exchange.rids:
            del self._by_rid[rid]
        if not self._exchanges:
            self._idle.set()
        usage = exchange.usage
        self.quotas.charge(exchange.key, usage.prompt_tokens + usage.completion_tokens, self.now())

    def abort(self, rid: str, *, key: str) -> bool:
        """End a running request for its owner, all of it; False when that key has none of that id."""
        exchange = self._by_rid.get(rid)
        if exchange is None or exchange.key != key:
            return False
        exchange.cut(aborted(f"the request {rid!r} was aborted", "aborted"))
        return True

    def abort_all(self, error: ApiError) -> None:
        for exchange in list(self._exchanges):
            exchange.cut(error)

    async def tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tick(self.now())

    def _tick(self, now_s: float) -> None:
        if self._ticked_s is not None and now_s - self._ticked_s > TICK_S + self.config.replica_silence_s / 2:
            self.view.take_gap(now_s)
        self._ticked_s = now_s
        self.view.forget_silent(now_s)
        for exchange in list(self._exchanges):
            exchange.tick(now_s)

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()


def _namespace(key: str, cache_salt: str | None) -> str:
    """The cache namespace of a request: of its key, and of its salt inside that. Nobody can name another one's."""
    if not key and cache_salt is None:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for part in (key, cache_salt):
        # Length first, and apart from "none": no two pairs of key and salt are written alike.
        encoded = b"" if part is None else part.encode()
        digest.update(f"{-1 if part is None else len(encoded)}:".encode() + encoded)
    return digest.hexdigest()
