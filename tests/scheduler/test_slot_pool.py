import pytest

from services.scheduler.extents import Extent, Extents
from services.scheduler.slot_pool import OutOfSlots, SlotPool


def pool_with_free(num_slots: int, *runs: tuple[int, int]) -> SlotPool:
    pool = SlotPool(num_slots)
    pool.allocate(num_slots)
    pool.free(Extent(start, length) for start, length in runs)
    pool.check_invariants()
    return pool


def test_the_shortest_run_that_is_long_enough_is_used() -> None:
    pool = pool_with_free(100, (0, 30), (40, 10), (60, 12), (80, 5))
    assert pool.allocate(9) == [Extent(40, 9)]
    assert pool.num_free == 48


def test_the_lowest_of_equally_good_runs_is_used() -> None:
    pool = pool_with_free(100, (60, 10), (20, 10))
    assert pool.allocate(10) == [Extent(20, 10)]


def test_what_fits_no_run_is_split_over_the_longest() -> None:
    pool = pool_with_free(100, (0, 3), (10, 8), (30, 5))
    assert pool.allocate(12) == [Extent(10, 8), Extent(30, 4)]
    assert pool.free_extents() == [Extent(0, 3), Extent(34, 1)]


def test_a_split_ends_in_the_run_that_fits_the_rest_best() -> None:
    pool = pool_with_free(100, (0, 3), (10, 8), (30, 5))
    assert pool.allocate(11) == [Extent(10, 8), Extent(0, 3)]


def test_nothing_is_taken_when_too_little_is_free() -> None:
    pool = pool_with_free(100, (0, 3), (10, 8))
    for refused in (lambda: pool.allocate(12), lambda: pool.allocate_after(10, 12)):
        with pytest.raises(OutOfSlots, match="12 KV slots wanted, 11 are free") as error:
            refused()
        assert (error.value.wanted, error.value.free) == (12, 11)
    assert pool.free_extents() == [Extent(0, 3), Extent(10, 8)]


def test_allocating_nothing_takes_nothing() -> None:
    pool = SlotPool(0)
    assert pool.allocate(0) == []
    assert pool.allocate_after(0, 0) == []


def test_a_tail_grows_in_place_where_the_slots_behind_it_are_free() -> None:
    pool = SlotPool(100)
    (first,) = pool.allocate(10)
    assert pool.allocate_after(first.start + first.length, 5) == [Extent(10, 5)]


def test_a_tail_goes_on_elsewhere_when_the_run_behind_it_is_too_short() -> None:
    pool = pool_with_free(100, (10, 2), (20, 6), (50, 40))
    assert pool.allocate_after(10, 5) == [Extent(10, 2), Extent(20, 3)]


def test_a_tail_that_cannot_grow_is_placed_like_any_other() -> None:
    pool = pool_with_free(100, (20, 6), (50, 40))
    assert pool.allocate_after(10, 5) == [Extent(20, 5)]


@pytest.mark.parametrize("pieces", [[(0, 4), (4, 4), (8, 4)], [(8, 4), (0, 4), (4, 4)], [(0, 4), (8, 4), (4, 4)]])
def test_pieces_that_touch_become_one_run_in_any_order(pieces: list[tuple[int, int]]) -> None:
    pool = pool_with_free(12, *pieces)
    assert pool.allocate(12) == [Extent(0, 12)]


@pytest.mark.parametrize("again", [(10, 10), (10, 1), (19, 1), (12, 3), (5, 6), (19, 4), (5, 30)])
def test_slots_freed_twice_are_noticed_and_nothing_is_changed(again: tuple[int, int]) -> None:
    pool = pool_with_free(50, (10, 10), (40, 5))
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([Extent(*again)])
    pool.check_invariants()
    assert pool.num_free == 15


@pytest.mark.parametrize("outside", [(-1, 2), (48, 3), (50, 1), (3, 0)])
def test_slots_that_are_not_in_the_pool_are_noticed(outside: tuple[int, int]) -> None:
    pool = pool_with_free(50)
    with pytest.raises(AssertionError, match="not in a pool of 50"):
        pool.free([Extent(*outside)])


def test_the_same_history_gives_the_same_slots() -> None:
    def history() -> list[Extents]:
        pool = SlotPool(200)
        taken = [pool.allocate(num) for num in (50, 20, 30, 10)]
        pool.free(taken[1])
        return [*taken, pool.allocate(25), pool.allocate_after(110, 7)]

    assert history() == history()
