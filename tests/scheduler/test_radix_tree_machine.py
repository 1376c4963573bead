"""The radix tree and the slot pool beside a plain model, through any history: every slot accounted for after every step."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.radix_model import TreeWorld

NUM_SLOTS = 40

namespaces = st.sampled_from(["", "a"])
seeds = st.integers(0, 7)
cuts = st.just(NUM_SLOTS) | st.integers(0, 12)
runs = st.just([]) | st.lists(st.integers(0, 2), max_size=6)
limits = st.just(NUM_SLOTS) | st.integers(0, 12)


class RadixTreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = TreeWorld(NUM_SLOTS)

    @rule(namespace=namespaces, seed=seeds, cut=cuts, more=runs, lock=st.booleans())
    def insert(self, namespace: str, seed: int, cut: int, more: list[int], lock: bool) -> None:
        self.world.insert(namespace, self.world.tokens(seed, cut, more), lock)

    @rule(namespace=namespaces, seed=seeds, cut=cuts, more=runs, limit=limits, lock=st.booleans())
    def match(self, namespace: str, seed: int, cut: int, more: list[int], limit: int, lock: bool) -> None:
        self.world.match(namespace, self.world.tokens(seed, cut, more), limit, lock)

    @rule(seed=seeds)
    def unlock(self, seed: int) -> None:
        self.world.unlock(seed)

    @rule(num=st.integers(0, 20))
    def evict(self, num: int) -> None:
        self.world.evict(num)

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @rule(everything=st.booleans())
    def clear(self, everything: bool) -> None:
        if everything:
            self.world.reset()
        else:
            self.world.clear_unlocked()

    @rule()
    def take_events(self) -> None:
        self.world.take_events()

    @invariant()
    def all_agree(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.take_events()
        while self.world.held:
            self.world.unlock(0)
        self.world.clear_unlocked()
        self.world.check()
        assert self.world.pool.num_free == NUM_SLOTS


TestRadixTreeMachine = RadixTreeMachine.TestCase
TestRadixTreeMachine.settings = settings(
    max_examples=900, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
def test_a_hundred_thousand_operations_leave_no_slot_unaccounted_for() -> None:
    draw = random.Random(17)
    world = TreeWorld(num_slots=90)
    for _ in range(100_000):
        namespace = draw.choice(["", "a", "b"])
        lock = draw.random() < 0.3
        match draw.randrange(10):
            case 0 | 1 | 2:
                more = [draw.randrange(3) for _ in range(draw.randrange(8))]
                world.insert(namespace, world.tokens(draw.randrange(16), draw.randrange(16), more), lock)
            case 3 | 4:
                more = [draw.randrange(3) for _ in range(draw.randrange(4))]
                tokens = world.tokens(draw.randrange(16), draw.randrange(16), more)
                world.match(namespace, tokens, draw.randrange(24), lock)
            case 5 | 6:
                world.unlock(draw.randrange(1000))
            case 7:
                world.evict(draw.randrange(30))
            case 8:
                world.tick()
            case 9:
                world.take_events()
        if draw.random() < 0.002:
            world.clear_unlocked()
        if draw.random() < 0.0005:
            world.reset()
        world.check()
