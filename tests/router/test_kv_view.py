"""The router's view of a cache follows numbered events, and heals after gaps by a snapshot."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from services.router.kv_view import KvView
from shared.messages.cluster import KvEvents, KvSnapshot


def packed(*blocks: int) -> bytes:
    return array("Q", blocks).tobytes()


def events(
    first: int, *, stored: tuple[int, ...] = (), removed: tuple[int, ...] = (), epoch: int = 1, cleared: bool = False
):
    return KvEvents(
        replica_id="a", epoch=epoch, first=first, stored=packed(*stored), removed=packed(*removed), cleared=cleared
    )


def snapshot(number: int, *stored: int, epoch: int = 1) -> KvSnapshot:
    return KvSnapshot(replica_id="a", epoch=epoch, number=number, stored=packed(*stored))


def test_only_blocks_from_the_start_without_a_hole_count():
    view = KvView(max_blocks=10)
    view.apply(events(1, stored=(1, 2, 4)))
    assert view.count_leading([1, 2, 3, 4]) == 2
    assert view.count_leading([9, 1]) == 0


def test_events_from_the_first_on_need_no_snapshot():
    view = KvView(max_blocks=10)
    view.apply(events(1, stored=(1,)))
    view.apply(events(2, stored=(2,), removed=(1,)))
    assert view.is_synced
    assert view.count_leading([2]) == 1
    assert view.count_leading([1]) == 0


def test_a_gap_asks_for_a_snapshot_and_the_view_stays_the_best_guess():
    view = KvView(max_blocks=10)
    view.apply(events(1, stored=(1,)))
    view.apply(events(3, stored=(3,)))
    assert not view.is_synced
    assert view.count_leading([1, 3]) == 2


def test_events_that_overtake_the_snapshot_are_not_lost():
    view = KvView(max_blocks=10)
    view.apply(events(7, stored=(7,)))
    view.apply(events(8, removed=(1,)))
    view.replace(snapshot(6, 1, 2))
    assert view.is_synced
    assert view.count_leading([2, 7]) == 2
    assert view.count_leading([1]) == 0


def test_a_snapshot_that_leaves_a_gap_does_not_count_as_synced():
    view = KvView(max_blocks=10)
    view.apply(events(9, stored=(9,)))
    view.replace(snapshot(6, 1))
    assert not view.is_synced


def test_doubled_and_late_events_change_nothing():
    view = KvView(max_blocks=10)
    view.apply(events(1, stored=(1,)))
    view.apply(events(2, removed=(1,)))
    view.apply(events(1, stored=(1,)))
    assert view.is_synced
    assert view.num_blocks == 0


def test_a_new_epoch_starts_empty_and_an_old_one_is_ignored():
    view = KvView(max_blocks=10)
    view.apply(events(1, stored=(1,), epoch=1))
    view.apply(events(1, stored=(2,), epoch=2))
    view.apply(events(2, stored=(3,), epoch=1))
    view.replace(snapshot(9, 4, epoch=1))
    assert view.count_leading([2]) == 1
    assert view.num_blocks == 1


def test_cleared_closes_a_gap():
    view = KvView(max_blocks=10)
    view.apply(events(5, stored=(5,)))
    view.apply(events(7, stored=(7,), cleared=True))
    assert view.is_synced
    assert view.num_blocks == 1


def test_beyond_the_bound_the_oldest_blocks_are_forgotten():
    view = KvView(max_blocks=3)
    view.apply(events(1, stored=(1, 2, 3, 4, 5)))
    assert view.num_blocks == 3
    assert view.count_leading([3, 4, 5]) == 3


step = st.tuples(st.sets(st.integers(0, 20), max_size=4), st.sets(st.integers(0, 20), max_size=4))


@given(st.lists(step, min_size=1, max_size=30), st.data())
def test_after_any_losses_a_snapshot_brings_the_truth_back(steps, data):
    """The tree is the reference; some events get lost or doubled, then one snapshot of any moment since the losses arrives."""
    truth: set[int] = set()
    history = [frozenset(truth)]
    sent = []
    for number, (stored, removed) in enumerate(steps, start=1):
        truth = (truth - removed) | stored
        history.append(frozenset(truth))
        sent.append(events(number, stored=tuple(stored), removed=tuple(removed)))
    lossy_until = data.draw(st.integers(0, len(sent) - 1))  # a loss shows when the next message comes
    view = KvView(max_blocks=1000)
    for number, event in enumerate(sent, start=1):
        copies = data.draw(st.integers(0, 2)) if number <= lossy_until else 1
        for _ in range(copies):
            view.apply(event)
    if not view.is_synced:
        number = data.draw(st.integers(lossy_until, len(sent)))
        view.replace(snapshot(number, *history[number]))
    assert all(view.count_leading([block]) == (block in truth) for block in range(21))
