from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.kv_hashes import KvLedger

# 0 to 4: this block comes, or goes if it is there; None: all go at once; "take": a router looks.
histories = st.lists(st.integers(0, 4) | st.sampled_from([None, "take"]), max_size=30)


@given(histories)
def test_deltas_replay_to_what_is_there_and_mention_only_what_changed(history: list[int | str | None]) -> None:
    ledger = KvLedger()
    there: set[int] = set()
    router: set[int] = set()
    for event in [*history, "take"]:
        match event:
            case int() if event in there:
                ledger.remove([event])
                there.remove(event)
            case int():
                ledger.store([event])
                there.add(event)
            case None:
                ledger.clear()
                there.clear()
            case _:
                delta = ledger.take()
                if delta.cleared:
                    router.clear()
                assert len(delta.stored) == len(set(delta.stored))
                assert router.issuperset(delta.removed)
                router -= set(delta.removed)
                assert router.isdisjoint(delta.stored)
                router |= set(delta.stored)
                assert router == there
    assert ledger.take() == ([], [], False)


def test_hashes_keep_the_order_in_which_they_came() -> None:
    ledger = KvLedger()
    ledger.store([9, 3, 7])
    ledger.remove([5, 1])
    assert ledger.take() == ([9, 3, 7], [5, 1], False)
