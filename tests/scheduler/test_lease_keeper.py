"""Claiming a worker group over the bus."""

import asyncio

from services.scheduler.lease_keeper import LeaseKeeper
from shared import subjects
from shared.bus import Delivery
from shared.messages.cluster import Heartbeat, ServiceState
from shared.messages.execution import Claim, Lease, Refused
from shared.messages.packing import pack
from tests.support.memory_bus import MemoryBroker, MemoryBus

MODEL = "m"
CLAIM = Claim(replica_id="r", scheduler_instance="s")


def heartbeat(group: str, free: int, epoch: int = 0) -> Heartbeat:
    info: dict[str, str | int | float] = {"group": group, "free": free}
    return Heartbeat(role="worker", instance=group, state=ServiceState.READY, epoch=epoch, info=info)


class Group:
    """A worker group that answers claims."""

    def __init__(self, bus: MemoryBus, name: str, refuses: bool = False) -> None:
        self.bus = bus
        self.name = name
        self.refuses = refuses
        self.num_claims = 0
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        await self.bus.subscribe(subjects.worker_claim(MODEL, self.name), self._on_claim)

    def _on_claim(self, delivery: Delivery) -> None:
        self.num_claims += 1
        reply: Lease | Refused = Refused(reason="leased to another")
        if not self.refuses:
            reply = Lease(
                group=self.name,
                epoch=self.num_claims,
                num_slots=100,
                context_len=100,
                vocab_size=10,
                end_token_ids=(0,),
            )
        task = asyncio.create_task(self.bus.publish(delivery.reply, pack(reply)))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)


async def keeper_with(*groups: tuple[str, bool], wanted: str = "") -> LeaseKeeper:
    broker = MemoryBroker(seed=1)
    for name, refuses in groups:
        await Group(MemoryBus(broker), name, refuses).serve()
    return LeaseKeeper(MemoryBus(broker), MODEL, CLAIM, wanted, silence_ms=3000)


async def test_a_free_group_is_claimed_and_one_that_refuses_is_passed_over() -> None:
    keeper = await keeper_with(("a", True), ("b", False))
    assert await keeper.claim(0) is None
    keeper.heard(heartbeat("a", free=1), 0)
    keeper.heard(heartbeat("b", free=1), 0)
    lease = await keeper.claim(0)
    assert lease is not None and lease.group == "b"


async def test_only_the_wanted_group_is_claimed() -> None:
    keeper = await keeper_with(("a", False), ("b", False), wanted="b")
    keeper.heard(heartbeat("a", free=1), 0)
    assert await keeper.claim(0) is None
    keeper.heard(heartbeat("b", free=1), 0)
    assert await keeper.claim(0) is not None


async def test_a_group_not_heard_of_lately_is_not_asked() -> None:
    keeper = await keeper_with(("a", False))
    keeper.heard(heartbeat("a", free=1), 0)
    assert await keeper.claim(3001) is None


async def test_silence_of_the_leased_worker_shows() -> None:
    keeper = await keeper_with(("a", False))
    keeper.heard(heartbeat("a", free=1), 0)
    await keeper.claim(0)
    keeper.heard(heartbeat("a", free=0, epoch=1), 2000)
    assert not keeper.is_silent(4000)
    keeper.heard(heartbeat("a", free=0, epoch=9), 4500)  # of another lease: ours is over
    assert keeper.is_silent(5001)


async def test_a_worker_that_was_given_up_is_claimed_again_although_it_hears_us_and_is_not_free() -> None:
    keeper = await keeper_with(("a", False))
    keeper.heard(heartbeat("a", free=1), 0)
    await keeper.claim(0)
    keeper.drop()
    keeper.heard(heartbeat("a", free=0, epoch=1), 500)
    lease = await keeper.claim(600)
    assert lease is not None and lease.epoch == 2


async def test_a_group_that_was_given_up_is_asked_after_all_others() -> None:
    keeper = await keeper_with(("a", False), ("b", False))
    keeper.heard(heartbeat("a", free=1), 0)
    await keeper.claim(0)
    keeper.drop()
    keeper.heard(heartbeat("a", free=0, epoch=1), 500)
    keeper.heard(heartbeat("b", free=1), 500)
    lease = await keeper.claim(600)
    assert lease is not None and lease.group == "b"
