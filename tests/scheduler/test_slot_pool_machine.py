"""The slot pool beside a plain set of free slots, through any history."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.scheduler.extents import Extent, Extents, slice_extents, total
from services.scheduler.slot_pool import OutOfSlots, SlotPool
from tests.support.radix_model import slots_of

NUM_SLOTS = 48


def runs_of(slots: set[int]) -> Extents:
    """A set of slots as maximal runs."""
    runs: Extents = []
    for slot in sorted(slots):
        if runs and runs[-1].start + runs[-1].length == slot:
            runs[-1] = Extent(runs[-1].start, runs[-1].length + 1)
        else:
            runs.append(Extent(slot, 1))
    return runs


class PoolWorld:
    """A pool, the set of slots that should be free, and everything that is out."""

    def __init__(self, num_slots: int) -> None:
        self.pool = SlotPool(num_slots)
        self.free_slots = set(range(num_slots))
        self.out: list[Extents] = []

    def allocate(self, num: int) -> None:
        runs = runs_of(self.free_slots)
        try:
            taken = self.pool.allocate(num)
        except OutOfSlots:
            assert num > len(self.free_slots)
            return
        self._took(taken, num)
        fitting = [run for run in runs if run.length >= num]
        if num and fitting:
            best = min(run.length for run in fitting)
            assert taken == [Extent(next(run.start for run in fitting if run.length == best), num)]
        else:
            # No run was long enough: longer ones go first, and only the last piece is cut out of a run.
            assert all(run in runs for run in taken[:-1])
            assert [run.length for run in taken[:-1]] == sorted((run.length for run in taken[:-1]), reverse=True)

    def allocate_after(self, seed: int, num: int) -> None:
        last = self.out[seed % len(self.out)][-1] if self.out else Extent(0, 0)
        end = last.start + last.length
        behind = next((run.length for run in runs_of(self.free_slots) if run.start == end), 0)
        try:
            taken = self.pool.allocate_after(end, num)
        except OutOfSlots:
            assert num > len(self.free_slots)
            return
        self._took(taken, num)
        if num and behind:
            assert taken[0] == Extent(end, min(num, behind))

    def free(self, seed: int, cut: int) -> None:
        """Give back the part of an allocation behind `cut`, or all of it."""
        if not self.out:
            return
        extents = self.out.pop(seed % len(self.out))
        cut = min(cut, total(extents))
        kept, returned = slice_extents(extents, 0, cut), slice_extents(extents, cut, total(extents))
        if kept:
            self.out.append(kept)
        self.pool.free(returned)
        self.free_slots.update(slots_of(returned))

    def free_twice(self, seed: int, num: int) -> None:
        """The pool notices before anything is damaged."""
        runs = runs_of(self.free_slots)
        if runs:
            run = runs[seed % len(runs)]
            with pytest.raises(AssertionError, match="freed twice"):
                self.pool.free([Extent(run.start + run.length - 1, 1)])
            with pytest.raises(AssertionError, match=r"freed twice|not in a pool"):
                self.pool.free([Extent(run.start, run.length + num)])

    def check(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_free == len(self.free_slots)
        assert self.pool.free_extents() == runs_of(self.free_slots)

    def _took(self, taken: Extents, num: int) -> None:
        slots = slots_of(taken)
        assert len(slots) == len(set(slots)) == num
        assert self.free_slots.issuperset(slots)
        self.free_slots.difference_update(slots)
        if taken:
            self.out.append(taken)


class SlotPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = PoolWorld(NUM_SLOTS)

    @rule(num=st.integers(0, NUM_SLOTS))
    def allocate(self, num: int) -> None:
        self.world.allocate(num)

    @rule(num=st.integers(1, 6))
    def allocate_few(self, num: int) -> None:
        self.world.allocate(num)

    @rule(seed=st.integers(0, 30), num=st.integers(0, 20))
    def allocate_after(self, seed: int, num: int) -> None:
        self.world.allocate_after(seed, num)

    @rule(seed=st.integers(0, 30), cut=st.integers(0, 10))
    def free(self, seed: int, cut: int) -> None:
        self.world.free(seed, cut)

    @rule(seed=st.integers(0, 30), num=st.integers(0, 5))
    def free_twice(self, seed: int, num: int) -> None:
        self.world.free_twice(seed, num)

    @invariant()
    def all_agree(self) -> None:
        self.world.check()


TestSlotPoolMachine = SlotPoolMachine.TestCase
TestSlotPoolMachine.settings = settings(
    max_examples=700, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
def test_a_hundred_thousand_operations_leave_no_slot_unaccounted_for() -> None:
    draw = random.Random(17)
    world = PoolWorld(num_slots=200)
    for _ in range(100_000):
        seed = draw.randrange(1000)
        match draw.randrange(5):
            case 0:
                world.allocate(draw.randrange(40))
            case 1:
                world.allocate_after(seed, draw.randrange(12))
            case 2 | 3:
                world.free(seed, draw.choice([0, draw.randrange(12)]))
            case 4:
                world.free_twice(seed, draw.randrange(3))
        world.check()
