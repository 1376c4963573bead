from collections.abc import Iterable

import numpy as np
import pytest

from services.scheduler.eviction import EvictionPolicy, fifo, lfu, lru
from services.scheduler.extents import Extent, Extents
from services.scheduler.radix_tree import Insertion, Match, RadixTree
from shared.kv_hashes import block_hashes
from shared.messages.packing import pack_int32
from tests.support.radix_model import slots_of, token_array


class Cache:
    """A tree that gets neighbouring slots and the next step at each call."""

    def __init__(self, policy: EvictionPolicy = lru, block_size: int = 4) -> None:
        self.tree = RadixTree(policy, block_size)
        self.next_slot = 0
        self.step = 0

    def insert(self, tokens: Iterable[int], namespace: str = "") -> Insertion:
        array = token_array(tokens)
        extents = [Extent(self.next_slot, len(array))] if len(array) else []
        self.next_slot += len(array)
        self.step += 1
        insertion = self.tree.insert(namespace, array, extents, self.step)
        self.tree.check_invariants()
        return insertion

    def match(self, tokens: Iterable[int], namespace: str = "", limit: int = 1_000_000) -> Match:
        self.step += 1
        match = self.tree.match_prefix(namespace, token_array(tokens), limit, self.step)
        self.tree.check_invariants()
        return match

    def match_len(self, tokens: Iterable[int], namespace: str = "") -> int:
        return self.tree.match_len(namespace, token_array(tokens))

    def evict(self, num: int) -> Extents:
        freed = self.tree.evict(num)
        self.tree.check_invariants()
        return freed


def test_what_was_inserted_is_found_with_its_slots() -> None:
    cache = Cache()
    cache.insert(range(10))
    match = cache.match([*range(10), 99])
    assert (match.length, match.extents) == (10, [Extent(0, 10)])


def test_a_match_ends_at_any_token() -> None:
    cache = Cache()
    cache.insert(range(10))
    assert cache.match([0, 1, 2, 77, 4]).extents == [Extent(0, 3)]
    assert cache.match(range(7)).extents == [Extent(0, 7)]
    assert cache.match([5, 6]).length == 0


def test_a_match_stops_at_the_limit() -> None:
    """The last token of a prompt is always computed: someone must produce the logits."""
    cache = Cache()
    cache.insert(range(10))
    assert cache.match(range(10), limit=9).extents == [Extent(0, 9)]
    assert cache.match(range(10), limit=0).extents == []
    assert cache.tree.match_len("", token_array(range(10)), 9) == 9


def test_a_prefix_is_held_once() -> None:
    cache = Cache()
    cache.insert([1, 2, 3, 4, 5])
    second = cache.insert([1, 2, 3, 8, 9])
    assert second.matched == 3
    assert second.extents == [Extent(0, 3), Extent(8, 2)], "slots 5, 6 and 7 are duplicates of 0, 1 and 2"
    assert cache.tree.num_slots == 7


def test_inserting_what_is_there_gives_the_slots_of_the_tree() -> None:
    cache = Cache()
    cache.insert(range(6))
    again = cache.insert(range(4))
    assert (again.matched, again.extents) == (4, [Extent(0, 4)])
    assert again.node.end == 4, "the caller locks its own tokens and no others"
    assert cache.tree.num_slots == 6


def test_an_answer_that_continues_its_prompt_is_found_by_the_next_turn() -> None:
    cache = Cache()
    cache.insert(range(6))
    cache.insert(range(9))
    assert cache.match([*range(9), 50, 51]).extents == [Extent(0, 6), Extent(12, 3)]


def test_negative_and_large_token_ids_are_tokens_like_others() -> None:
    cache = Cache()
    cache.insert([-1, 2**31 - 1, -(2**31)])
    assert cache.match_len([-1, 2**31 - 1, -(2**31), 0]) == 3
    assert cache.match_len([-1, 2**31 - 1, 0]) == 2


def test_namespaces_never_share() -> None:
    cache = Cache()
    cache.insert(range(10), "a")
    assert cache.match_len(range(10), "b") == 0
    assert cache.match(range(10)).length == 0
    assert cache.insert(range(10), "b").matched == 0
    assert cache.tree.num_slots == 20


def test_a_namespace_leaves_nothing_behind() -> None:
    cache = Cache()
    for tenant in range(100):
        match = cache.match([1, 2], namespace=f"{tenant}")  # asked, and stood on, before anything is there
        cache.tree.lock(match.node)
        cache.insert([1, 2, 3], namespace=f"{tenant}")
        cache.tree.unlock(match.node)
    assert len(cache.evict(300)) > 0
    assert cache.tree.num_slots == 0
    cache.tree.check_invariants()
    assert cache.tree.all_hashes() == []


def test_looking_without_touching_neither_splits_nor_saves_from_eviction() -> None:
    cache = Cache()
    cache.insert([1, 2, 3])
    cache.insert([7, 8, 9])
    version = cache.tree.version
    assert cache.match_len([1, 2]) == 2
    assert len(list(cache.tree.nodes())) == 2
    assert cache.tree.version == version
    assert cache.evict(3) == [Extent(0, 3)]


def test_the_version_rises_with_every_change_of_what_is_cached() -> None:
    cache = Cache()
    versions = [cache.tree.version]
    for change in (lambda: cache.insert(range(9)), lambda: cache.evict(2), cache.tree.clear_unlocked, cache.tree.reset):
        change()
        versions.append(cache.tree.version)
    assert versions == sorted(set(versions))


def test_a_locked_prefix_stays_and_its_continuation_goes() -> None:
    cache = Cache()
    cache.insert(range(10))
    match = cache.match(range(6))
    cache.tree.lock(match.node)
    assert cache.tree.num_evictable_slots == 4
    assert slots_of(cache.evict(100)) == [6, 7, 8, 9]
    assert cache.match_len(range(10)) == 6
    cache.tree.unlock(match.node)
    assert cache.tree.num_evictable_slots == 6
    assert slots_of(cache.evict(100)) == [0, 1, 2, 3, 4, 5]


def test_a_prefix_stays_until_its_last_request_leaves() -> None:
    cache = Cache()
    node = cache.insert(range(4)).node
    cache.tree.lock(node)
    cache.tree.lock(node)
    cache.tree.unlock(node)
    assert cache.evict(1) == []
    cache.tree.unlock(node)
    assert cache.evict(4) == [Extent(0, 4)]


def test_a_lock_holds_when_its_node_is_split_by_others() -> None:
    cache = Cache()
    node = cache.insert(range(8)).node
    cache.tree.lock(node)
    cache.insert([0, 1, 2, 60])
    assert cache.tree.num_evictable_slots == 1
    cache.match(range(5))
    assert slots_of(cache.evict(100)) == [11]
    cache.tree.unlock(node)
    assert cache.tree.num_evictable_slots == 8


def test_unlocking_more_often_than_locking_is_a_mistake() -> None:
    cache = Cache()
    node = cache.insert(range(3)).node
    with pytest.raises(AssertionError, match="more often"):
        cache.tree.unlock(node)


def test_locking_what_was_evicted_is_a_mistake() -> None:
    cache = Cache()
    node = cache.insert(range(3)).node
    cache.evict(3)
    with pytest.raises(AssertionError, match="evicted before"):
        cache.tree.lock(node)


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = Cache()
    for first in (10, 20, 30):
        cache.insert([first, first + 1])
    cache.match([10, 11])
    assert [slots_of(cache.evict(2)) for _ in range(3)] == [[2, 3], [4, 5], [0, 1]]


def test_the_older_insertion_goes_first_among_equals() -> None:
    cache = Cache()
    for first in (30, 10, 20):
        cache.step = 0
        cache.insert([first, first + 1])
    assert [slots_of(cache.evict(2)) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_a_parent_goes_after_its_children() -> None:
    cache = Cache()
    cache.insert([1, 2, 3, 4])
    cache.insert([1, 2, 5])
    cache.insert([9])
    assert [slots_of(cache.evict(n)) for n in (2, 1, 2, 1)] == [[2, 3], [6], [0, 1], [7]]


def test_only_as_much_is_evicted_as_is_needed() -> None:
    cache = Cache()
    cache.insert(range(10))
    assert cache.evict(0) == []
    assert cache.evict(3) == [Extent(7, 3)]
    assert cache.match_len(range(10)) == 7
    assert cache.evict(100) == [Extent(0, 7)]


def test_first_in_first_out_ignores_use() -> None:
    cache = Cache(fifo)
    for first in (10, 20):
        cache.insert([first, first + 1])
    cache.match([10, 11])
    assert slots_of(cache.evict(2)) == [0, 1]


def test_the_least_often_used_goes_first_under_lfu() -> None:
    cache = Cache(lfu)
    for first in (10, 20, 30):
        cache.insert([first, first + 1])
    for first in (10, 10, 30, 20, 20):
        cache.match([first, first + 1])
    assert [slots_of(cache.evict(2)) for _ in range(3)] == [[4, 5], [0, 1], [2, 3]]


def test_flushing_drops_all_but_what_requests_stand_on() -> None:
    cache = Cache()
    cache.insert(range(10))
    cache.insert([0, 1, 50, 51], "b")
    match = cache.match(range(4))
    cache.tree.lock(match.node)
    assert sorted(slots_of(cache.tree.clear_unlocked())) == list(range(4, 14))
    cache.tree.check_invariants()
    assert (cache.tree.num_slots, cache.tree.num_evictable_slots) == (4, 0)
    cache.tree.unlock(match.node)
    assert slots_of(cache.evict(100)) == [0, 1, 2, 3]


def test_a_block_is_stored_with_its_last_token_and_removed_with_it() -> None:
    cache = Cache(block_size=4)
    names = block_hashes("", pack_int32(range(12)), 4)
    cache.insert(range(7))
    assert cache.tree.take_events() == (names[:1], [], False)
    cache.insert(range(12))
    assert cache.tree.take_events() == (names[1:], [], False)
    cache.evict(1)
    assert cache.tree.take_events() == ([], names[2:], False)
    assert cache.tree.all_hashes() == names[:2]


def test_a_block_that_came_and_went_between_two_looks_is_not_mentioned() -> None:
    cache = Cache(block_size=4)
    cache.insert(range(8))
    cache.evict(8)
    assert cache.tree.take_events() == ([], [], False)
    cache.insert(range(8))
    cache.tree.take_events()
    cache.evict(8)
    cache.insert(range(8))
    assert cache.tree.take_events() == ([], [], False)


def test_splits_are_no_news() -> None:
    cache = Cache(block_size=4)
    cache.insert(range(16))
    cache.tree.take_events()
    for end in (15, 3, 4, 9):
        cache.match(range(end))
    assert cache.tree.take_events() == ([], [], False)


def test_a_new_epoch_forgets_everything() -> None:
    cache = Cache(block_size=4)
    cache.tree.lock(cache.insert(range(8)).node)
    cache.tree.reset()
    cache.tree.check_invariants()
    assert (cache.tree.num_slots, cache.tree.num_evictable_slots, cache.match_len(range(8))) == (0, 0, 0)
    cache.insert(range(100, 104))
    assert cache.tree.take_events() == (block_hashes("", pack_int32(range(100, 104)), 4), [], True)


def test_slots_and_tokens_must_be_as_many() -> None:
    with pytest.raises(AssertionError, match="3 slots for 4 tokens"):
        RadixTree().insert("", token_array(range(4)), [Extent(0, 3)], 0)


def test_the_tree_keeps_its_own_copy_of_the_tokens() -> None:
    tree = RadixTree()
    tokens = np.arange(8, dtype=np.int32)
    tree.insert("", tokens, [Extent(0, 8)], 0)
    tokens[:] = 0
    assert tree.match_len("", np.arange(8, dtype=np.int32)) == 8
    tree.check_invariants()


def test_the_same_history_gives_the_same_victims() -> None:
    def history() -> list[object]:
        cache = Cache()
        draw = np.random.default_rng(17)
        seen: list[object] = []
        for _ in range(200):
            cache.step -= int(draw.integers(0, 2))  # several calls within one step
            seen.append(cache.insert(draw.integers(0, 3, draw.integers(1, 9)).tolist(), f"{draw.integers(3)}").extents)
            seen.append(cache.evict(int(draw.integers(0, 6))))
            seen.append(cache.tree.take_events())
        return seen

    assert history() == history()
