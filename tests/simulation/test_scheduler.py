"""The scheduler core with a slow worker that checks every slot, and gateways that abort, under one seed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import pytest

from services.scheduler import events as ev
from services.scheduler.core import SchedulerCore
from services.scheduler.planner import Limits
from services.scheduler.settings import Settings
from shared.messages.execution import Lease, Step
from shared.messages.generation import Abort, Accepted, Emission, Finish, FinishReason, Frame, Submit
from shared.messages.packing import pack_int32, unpack_int32
from tests.simulation.world import Send, World
from tests.support.checked_worker import CheckedWorker, expected_output

GATEWAY = "g"
MAX_SECOND_PROMPT = 150


@dataclass
class Sent:
    prompt: list[int]
    max_new_tokens: int
    namespace: str = ""
    output: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stops_at: int | None = None
    """The gateway sees a stop string at so many tokens."""


class Gateway:
    """Submits requests that share prefixes, and goes on with some that have ended; aborts some at random; keeps what comes."""

    def __init__(self, random: Random, num_requests: int, abort_share: float) -> None:
        self.random = random
        self.abort_share = abort_share
        roots = [[random.randrange(1, 1000) for _ in range(random.randrange(1, 90))] for _ in range(4)]
        self.sent: dict[str, Sent] = {}
        for number in range(num_requests):
            root = random.choice(roots)
            prompt = root[: random.randrange(1, len(root) + 1)]
            prompt = prompt + [random.randrange(1, 1000) for _ in range(random.randrange(0, 40))]
            sent = Sent(prompt, random.randrange(0, 60), random.choice(["", "tenant"]))
            if random.random() < 0.2:
                sent.stops_at = random.randrange(1, 20)
            self.sent[f"r{number}"] = sent

    def start(self, world: World, within_ms: int = 300) -> None:
        for request_id, sent in self.sent.items():
            submit = self._submit(request_id, sent)
            at_ms = self.random.randrange(0, within_ms)
            world.send(f"client {request_id}", "scheduler", ev.Submitted(submit, GATEWAY), at_ms)
            if self.random.random() < self.abort_share:
                # From the same client, so never before its Submit; often before it is even admitted.
                world.send(
                    f"client {request_id}",
                    "scheduler",
                    Abort(request_id=request_id),
                    at_ms + self.random.randrange(0, 400),
                )

    def _submit(self, request_id: str, sent: Sent) -> Submit:
        return Submit(
            request_id=request_id,
            gateway_id=GATEWAY,
            prompt=pack_int32(sent.prompt),
            max_new_tokens=sent.max_new_tokens,
            namespace=sent.namespace,
            priority=self.random.choice([0, 0, 1]),
        )

    def __call__(self, now_ms: int, message: object) -> Iterable[Send]:
        if isinstance(message, Frame):
            for emission in message.emissions:
                yield from self._take(emission)
        else:
            assert isinstance(message, Accepted), message

    def _take(self, emission: Emission) -> Iterable[Send]:
        sent = self.sent[emission.request_id]
        assert sent.finish is None, "tokens after the finish"
        assert emission.position == len(sent.output), "a token was lost or repeated"
        assert emission.cached_tokens < len(sent.prompt)
        sent.output += unpack_int32(emission.token_ids)
        sent.finish = emission.finish
        if sent.finish is None and sent.stops_at is not None and len(sent.output) >= sent.stops_at:
            yield "scheduler", Finish(request_id=emission.request_id, num_tokens=sent.stops_at)
        if sent.finish is FinishReason.STOP and not emission.request_id.endswith("+"):
            # The second turn of a conversation: all that has been generated is in its prompt.
            prompt = [*sent.prompt, *sent.output, *(self.random.randrange(1, 1000) for _ in range(3))]
            if len(prompt) <= MAX_SECOND_PROMPT:
                second = self.sent[f"{emission.request_id}+"] = Sent(prompt, 20, sent.namespace)
                yield "scheduler", ev.Submitted(self._submit(f"{emission.request_id}+", second), GATEWAY)


class Replica:
    """The scheduler and its worker as handlers of one world."""

    def __init__(self, num_slots: int, limits: Limits, window: int = 2, forces: bool = False) -> None:
        self.num_slots = num_slots
        self.forces = forces
        self.core = SchedulerCore(Settings(replica_id="r", limits=limits, window=window))
        self.epoch = 0
        self.usage: list[ev.RecordUsage] = []
        self.core.step(0, [self.new_worker()])

    def new_worker(self) -> ev.WorkerJoined:
        """An empty worker under a new epoch takes the old one's place."""
        self.epoch += 1
        self.worker = CheckedWorker(self.num_slots, self.forces)
        lease = Lease(
            group="w",
            epoch=self.epoch,
            num_slots=self.num_slots,
            context_len=256,
            vocab_size=1000,
            end_token_ids=(0,),
        )
        return ev.WorkerJoined(lease)

    def kill_worker(self, now_ms: int, message: object) -> Iterable[Send]:
        yield "scheduler", ev.WorkerLost("killed")
        yield "scheduler", self.new_worker()

    def scheduler(self, now_ms: int, event: ev.Event) -> Iterable[Send]:
        for effect in self.core.step(now_ms, [event]):
            match effect:
                case ev.SendStep(step=step):
                    yield "worker", step
                case ev.SendFrame(gateway_id=gateway_id, frame=frame):
                    yield gateway_id, frame
                case ev.Reply(reply_to=reply_to, message=message):
                    yield reply_to, message
                case ev.RecordUsage():
                    self.usage.append(effect)
        for request in self.core.requests.values():
            request.check_invariants()

    def slow_worker(self, now_ms: int, step: Step) -> Iterable[Send]:
        if step.epoch == self.epoch:
            yield "scheduler", ev.StepDone(self.worker.execute(step))

    def assert_nothing_leaked(self) -> None:
        core, cache = self.core, self.core.cache
        assert core.is_idle and not core.requests and not core.waiting and not core.planner.running
        assert cache is not None
        assert cache.num_private_slots == 0
        assert cache.tree.num_evictable_slots == cache.tree.num_slots
        cache.pool.check_invariants()
        cache.tree.check_invariants()
        cache.check_balance()
        cache.flush()
        assert cache.pool.num_free == cache.pool.num_slots


def run(
    seed: int, num_slots: int, window: int = 2, abort_share: float = 0.3, forces: bool = False
) -> tuple[Replica, Gateway]:
    world = World(seed)
    limits = Limits(max_running_reqs=12, max_prefill_tokens=48, reserve_slots=8, min_shared_prefix=4)
    replica, gateway = Replica(num_slots, limits, window, forces), Gateway(world.random, 40, abort_share)
    gateway.start(world)
    world.run({"scheduler": replica.scheduler, "worker": replica.slow_worker, GATEWAY: gateway})
    return replica, gateway


@pytest.mark.parametrize("forces", [False, True], ids=["sampled", "forced"])
@pytest.mark.parametrize("seed", range(100))
def test_every_request_finishes_once_with_its_own_tokens_and_no_slot_leaks(seed: int, forces: bool) -> None:
    replica, gateway = run(seed, num_slots=Random(seed).choice([260, 400, 3000]), forces=forces)
    for request_id, sent in gateway.sent.items():
        expected = expected_output(sent.prompt, sent.max_new_tokens)
        assert sent.output == expected[: len(sent.output)], request_id
        assert sent.finish is not None
        if sent.finish is FinishReason.LENGTH or (sent.finish is FinishReason.STOP and sent.stops_at is None):
            assert sent.output == expected
    assert sorted(usage.request_id for usage in replica.usage) == sorted(gateway.sent)
    replica.assert_nothing_leaked()


def test_a_small_pool_retracts_and_nothing_shows() -> None:
    retracted = 0
    for seed in range(20):
        replica, gateway = run(seed, num_slots=200, abort_share=0.0)
        retracted += replica.core.planner.num_retracted_reqs
        for sent in gateway.sent.values():
            if sent.stops_at is None:
                assert sent.output == expected_output(sent.prompt, sent.max_new_tokens)
    assert retracted > 20, "a pool hardly larger than the longest request cannot but retract"


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_names_one_history(seed: int) -> None:
    assert run(seed, 300)[0].worker.extend_lens == run(seed, 300)[0].worker.extend_lens


@pytest.mark.parametrize("seed", range(20))
def test_without_pipelining_the_tokens_are_the_same(seed: int) -> None:
    _, gateway = run(seed, 400, window=1, abort_share=0.0)
    for sent in gateway.sent.values():
        if sent.stops_at is None:
            assert sent.output == expected_output(sent.prompt, sent.max_new_tokens)


@pytest.mark.parametrize("seed", range(40))
def test_a_lost_worker_costs_a_pause_and_no_token(seed: int) -> None:
    world = World(seed)
    limits = Limits(max_running_reqs=12, max_prefill_tokens=48, reserve_slots=8, min_shared_prefix=4)
    replica, gateway = Replica(400, limits), Gateway(world.random, 30, abort_share=0.1)
    gateway.start(world, within_ms=40)  # a replica without a worker takes no new requests
    world.send("chaos", "killer", None, world.random.randrange(50, 600))
    world.run(
        {"scheduler": replica.scheduler, "worker": replica.slow_worker, "killer": replica.kill_worker, GATEWAY: gateway}
    )
    for sent in gateway.sent.values():
        assert sent.output == expected_output(sent.prompt, sent.max_new_tokens)[: len(sent.output)]
        assert sent.finish in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
    replica.assert_nothing_leaked()


def test_a_request_under_way_at_two_worker_deaths_fails_alone() -> None:
    replica = Replica(400, Limits())
    poison = Submit(request_id="p", gateway_id=GATEWAY, prompt=pack_int32([1, 2, 3]), max_new_tokens=50)
    innocent = Submit(request_id="i", gateway_id=GATEWAY, prompt=pack_int32([4, 5]), max_new_tokens=50)
    replica.core.step(1, [ev.Submitted(poison)])
    list(replica.kill_worker(2, None))
    replica.core.step(2, [ev.WorkerLost("killed")])
    replica.core.step(3, [replica.new_worker()])
    effects = replica.core.step(4, [ev.WorkerLost("killed"), ev.Submitted(innocent)])
    finished = [e for effect in effects if isinstance(effect, ev.SendFrame) for e in effect.frame.emissions]
    assert [(emission.request_id, emission.finish) for emission in finished] == [("p", FinishReason.ERROR)]
    assert "poison" in (finished[0].error or "")
