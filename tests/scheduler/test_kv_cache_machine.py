"""Requests share a pool that is too small for them, through any history: no slot is lost, and none is overwritten in use."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.cache_world import CacheWorld

NUM_SLOTS = 32

seeds = st.integers(0, 15)


class KvCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = CacheWorld(NUM_SLOTS)

    @rule(
        namespace=st.sampled_from(["", "a"]),
        seed=seeds,
        cut=st.integers(0, 12),
        more=st.lists(st.integers(0, 2), max_size=6),
        num_spare=st.integers(0, 4),
    )
    def admit(self, namespace: str, seed: int, cut: int, more: list[int], num_spare: int) -> None:
        self.world.admit(namespace, seed, cut, more, num_spare)

    @rule(seed=seeds, num=st.integers(0, 6))
    def prefill(self, seed: int, num: int) -> None:
        self.world.prefill(seed, num)

    @rule(seed=seeds, token=st.integers(0, 2))
    def decode(self, seed: int, token: int) -> None:
        self.world.decode(seed, token)

    @rule(seed=seeds)
    def finish(self, seed: int) -> None:
        self.world.finish(seed)

    @rule(seed=seeds)
    def abort(self, seed: int) -> None:
        self.world.abort(seed)

    @rule()
    def flush(self) -> None:
        self.world.flush()

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @invariant()
    def every_slot_has_one_owner_and_the_right_content(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        while self.world.running:
            self.world.abort(0)
        self.world.flush()
        self.world.check()
        assert self.world.cache.pool.num_free == NUM_SLOTS


TestKvCacheMachine = KvCacheMachine.TestCase
TestKvCacheMachine.settings = settings(
    max_examples=600, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
def test_a_hundred_thousand_operations_leave_no_slot_unaccounted_for() -> None:
    draw = random.Random(17)
    world = CacheWorld(num_slots=100)
    for _ in range(100_000):
        seed = draw.randrange(1000)
        match draw.randrange(10):
            case 0 | 1:
                more = [draw.randrange(3) for _ in range(draw.randrange(8))]
                world.admit(draw.choice(["", "a", "b"]), seed, draw.randrange(20), more, draw.randrange(6))
            case 2 | 3:
                world.prefill(seed, draw.randrange(9))
            case 4 | 5 | 6:
                world.decode(seed, draw.randrange(3))
            case 7:
                world.finish(seed)
            case 8:
                if draw.random() < 0.4:
                    world.abort(seed)
            case 9:
                world.tick()
        if draw.random() < 0.001:
            world.flush()
        world.check()
