"""One client request from its plan to its last token: encoded, submitted, received, moved to another replica if need be."""

import asyncio
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from services.gateway.cluster_view import ClusterView
from services.gateway.config import GatewayConfig
from services.gateway.errors import aborted, deadline_exceeded, generation_failed
from services.gateway.flight import Flight
from services.gateway.generation.choice import Command, Delta, SendFinish, SendResync
from services.gateway.generation.generation import Generation, TokenUsage
from services.gateway.generation.plan import Plan
from services.gateway.lifeline import Lifeline
from services.gateway.mesh import Mesh
from services.gateway.metrics import Metrics
from services.gateway.model_facts import ModelFacts
from services.gateway.preparation import prepare
from shared.inbox import Inbox
from shared.messages.generation import UNKNOWN_REQUEST, Emission, Finish, FinishReason, Resync, Submit
from shared.telemetry import get_logger, inject

log = get_logger(__name__)

PROBE_S = 5.0
"""A request that hears nothing for this long asks again: the frame it waits for may have been lost."""
MAX_MOVES = 5
"""A request that loses its replica this often is taken for the reason."""
SCHEDULER_GRACE_MS = 500
"""The scheduler's deadline lies behind ours, so that the client's answer comes from here."""


class Phase(StrEnum):
    QUEUEING = "queueing"
    """Nothing was generated yet."""
    GENERATING = "generating"


class Exchange:
    """The shell around a Generation. Used by one task; `tick` and `cut` are called from others.

    rids        the client's names for the request
    key         the API key it came with, "" without
    generation  its choices, once the prompts are encoded
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rids: Sequence[str],
        key: str,
        namespace: str,
        serial: int,
        facts: ModelFacts,
        config: GatewayConfig,
        mesh: Mesh,
        view: ClusterView,
        metrics: Metrics,
        lifeline: Lifeline,
    ) -> None:
        self.plan = plan
        self.rids = rids
        self.key = key
        self.phase = Phase.QUEUEING
        self.started_s = self._now()
        self.first_token_s: float | None = None
        self._name = f"{config.instance}.{serial:x}"
        self._namespace = namespace
        self._facts = facts
        self._config = config
        self._mesh = mesh
        self._view = view
        self._metrics = metrics
        self._lifeline = lifeline
        self._generation: Generation | None = None
        self._flights: list[Flight] = []
        self._submits: list[Submit] = []
        self._moving: asyncio.Task[None] | None = None
        """Looks for another replica, for flights that have none."""
        self._tickers: list[Callable[[float], None]] = []
        self._inbox: Inbox[tuple[int, Emission]] = Inbox(
            config.max_unread_emissions * plan.num_prompts * plan.num_choices
        )
        self._last_token_s: list[float] = []
        """By choice."""
        self._timeout_s = min(config.request_timeout_s, plan.timeout_s or config.request_timeout_s)
        self._set_deadline(min(self._timeout_s, config.queue_timeout_s))

    @property
    def generation(self) -> Generation:
        assert self._generation is not None, "the prompts are not encoded yet"
        return self._generation

    @property
    def usage(self) -> TokenUsage:
        """The bill so far."""
        if self._generation is None:
            return TokenUsage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        return self._generation.usage()

    # -- the way there

    async def start(self) -> None:
        """Encode, vet the constraint, submit all choices; returns when replicas have accepted them. Raises ApiError."""
        pool_len = self._view.max_total_tokens(self._now())
        prepared = await prepare(self.plan, self._mesh, self._facts, pool_len)
        generation = Generation(self.plan, prepared.token_ids, prepared.limits, self._facts.vocabulary)
        self._generation = generation
        self._last_token_s = [self.started_s] * len(generation.choices)
        deadline_ms = time.time_ns() // 1_000_000 + int(self._timeout_s * 1000) + SCHEDULER_GRACE_MS
        trace = inject()
        for choice in range(len(generation.choices)):
            prompt = generation.prompt_index(choice)
            name = f"{self._name}.{choice}" if len(generation.choices) > 1 else self._name
            self._flights.append(Flight(name, choice, self._deliver, self._now()))
            self._submits.append(
                Submit(
                    request_id=name,
                    gateway_id=self._config.instance,
                    prompt=prepared.packed[prompt],
                    max_new_tokens=prepared.limits[prompt],
                    sampling=self.plan.sampling_of(prompt, choice % self.plan.num_choices),
                    namespace=self._namespace,
                    priority=self.plan.priority,
                    grammar=prepared.grammars[prompt],
                    deadline_ms=deadline_ms,
                    trace=trace,
                )
            )
        await self._fly(self._flights, patience_s=0.0)
        self._metrics.prompt_tokens.inc(sum(map(len, generation.prompts)))

    async def _fly(self, flights: Sequence[Flight], *, patience_s: float) -> None:
        param = self.plan.prompt_param
        flying = [
            self._mesh.fly(flight, self._submits[flight.choice], patience_s=patience_s, prompt_param=param)
            for flight in flights
        ]
        if len(flying) == 1:  # by far the most common: without a task of its own
            await flying[0]
        else:
            await asyncio.gather(*flying)

    # -- what comes back

    async def advance(self) -> list[tuple[int, Delta]]:
        """Wait until something happens; what it adds to the choices, oldest first. Empty after a `tick` that was due.

        Raises ApiError when the generation has failed.
        """
        items = await self._inbox.take_ready()
        generation, deltas = self.generation, []
        for choice, emission in items:
            if emission.error == UNKNOWN_REQUEST:
                self._flights[choice].forget_replica(emission.num_worker_deaths)
                continue
            advance = generation.receive(choice, emission)
            if advance.num_tokens:
                self._count_tokens(choice, advance.num_tokens)
            if advance.command is not None:
                self._tell(self._flights[choice], advance.command)
            if (delta := advance.delta) is None:
                continue
            deltas.append((choice, delta))
            if delta.finish is not None:
                self._finish(choice, delta.finish)
        self._move_lost()
        return deltas

    def _finish(self, choice: int, reason: FinishReason) -> None:
        self._mesh.land(self._flights[choice], abort_reason=None)
        if reason is FinishReason.ERROR:
            raise generation_failed(self.generation.choices[choice].error or "the generation has failed")
        if reason is FinishReason.ABORT:
            raise aborted("the request was aborted by the engine", "aborted")

    def _count_tokens(self, choice: int, num_tokens: int) -> None:
        now_s = self._now()
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.phase = Phase.GENERATING
            self._set_deadline(self._timeout_s)
            self._metrics.time_to_first_token.observe(now_s - self.started_s)
        elif self.generation.choices[choice].num_received > num_tokens:
            self._metrics.inter_token_latency.observe((now_s - self._last_token_s[choice]) / num_tokens)
        self._last_token_s[choice] = now_s
        self._metrics.generation_tokens.inc(num_tokens)

    def _move_lost(self) -> None:
        """Flights whose replica is gone go on elsewhere, behind the tokens that have come.

        Nobody waits for it, so that the other choices and the keep-alive go on. Raises ApiError where it is hopeless.
        """
        if self._moving is not None:
            return  # looked at again when that has ended
        moving = []
        for flight in [f for f in self._flights if f.replica_id is None and not f.is_landed]:
            flight.num_moves += 1
            if flight.num_moves > MAX_MOVES:
                raise generation_failed(f"{MAX_MOVES} replicas were lost while they computed this request")
            choice = self.generation.choices[flight.choice]
            submit = self._submits[flight.choice]
            if choice.num_received >= submit.max_new_tokens > 0:  # all of it is here, but for the word that it is
                self._deliver(flight.choice, _length_reached(flight, choice.num_received))
                continue
            self._submits[flight.choice] = msgspec.structs.replace(
                submit, resumed=choice.resume(), num_worker_deaths=flight.num_worker_deaths
            )
            self._metrics.num_moved.inc()
            log.warning("moving to another replica", request=flight.request_id, num_tokens=choice.num_received)
            moving.append(flight)
        if moving:
            flying = self._fly(moving, patience_s=self._config.failover_timeout_s)
            self._moving = asyncio.create_task(flying, name=f"move {self._name}")
            self._moving.add_done_callback(self._on_moved)

    def _on_moved(self, moving: asyncio.Task[None]) -> None:
        self._moving = None
        if not moving.cancelled() and (error := moving.exception()) is not None:
            self.cut(error)
        self.wake()

    def _tell(self, flight: Flight, command: Command) -> None:
        if flight.replica_id is None:
            return  # between two replicas; the next one is told everything anyway
        match command:
            case SendFinish(num_tokens=num_tokens):
                self._mesh.post(flight.replica_id, Finish(request_id=flight.request_id, num_tokens=num_tokens))
            case SendResync(position=position):
                resync = Resync(request_id=flight.request_id, gateway_id=self._config.instance, position=position)
                self._mesh.post(flight.replica_id, resync)

    # -- from other tasks

    def _deliver(self, choice: int, emission: Emission) -> None:
        if not self._inbox.append((choice, emission)):
            self.cut(aborted(f"{self._inbox.max_items} messages wait for the client to read", "slow_client"))

    def cut(self, error: BaseException) -> None:
        """End the exchange; its task gets `error` wherever it waits."""
        self._lifeline.cut(error)

    def on_tick(self, ticker: Callable[[float], None]) -> None:
        """Have `ticker` called with each `tick`."""
        self._tickers.append(ticker)

    def wake(self) -> None:
        """Let `advance` return although nothing came."""
        self._inbox.wake()

    def tick(self, now_s: float) -> None:
        """Look after the flights, a few times a second: has a replica gone silent, was a frame lost?"""
        for ticker in self._tickers:
            ticker(now_s)
        for flight in self._flights:
            if flight.is_landed or flight.replica_id is None:
                continue
            unheard_s = now_s - flight.heard_s
            silence_s = min(unheard_s, self._view.silence_of(flight.replica_id, now_s))
            if silence_s > self._config.replica_silence_s:
                flight.leave_replica()
                flight.heard_s = now_s
                self.wake()
            elif unheard_s > PROBE_S:
                flight.heard_s = now_s
                self._tell(flight, SendResync(self.generation.choices[flight.choice].num_received))

    def _set_deadline(self, limit_s: float) -> None:
        message = f"the request was still {self.phase} when its deadline of {limit_s:g} s passed"
        self._lifeline.cut_at(self.started_s + limit_s, deadline_exceeded(message))

    # -- the end

    def close(self, reason: str) -> None:
        """Stop what still runs. Must be called whatever has happened; does nothing to choices that have finished."""
        if self._moving is not None:
            self._moving.cancel()
        for flight in self._flights:
            self._mesh.land(flight, abort_reason=reason)
        if self._generation is not None and self._generation.is_finished:
            self._metrics.e2e_latency.observe(self._now() - self.started_s)
        self._metrics.cached_tokens.inc(self.usage.cached_tokens)

    def summary(self) -> dict[str, str | int | float]:
        """For the log: by which name the other services know it, and what it took."""
        told = msgspec.structs.asdict(self.usage) | {"request": self._name}
        if self.first_token_s is not None:
            told["ttft_s"] = round(self.first_token_s - self.started_s, 4)
        return told

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _length_reached(flight: Flight, num_tokens: int) -> Emission:
    return Emission(request_id=flight.request_id, position=num_tokens, token_ids=b"", finish=FinishReason.LENGTH)
