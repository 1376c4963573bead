"""The radix tree and the slot pool as anyone would believe them: one entry per cached token, no sharing of nodes, no heaps."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.extents import Extent, Extents, extend, slice_extents, total
from services.scheduler.radix_node import TokenIds
from services.scheduler.radix_tree import RadixNode, RadixTree
from services.scheduler.slot_pool import OutOfSlots, SlotPool
from shared.kv_hashes import block_hashes
from shared.messages.packing import pack_int32

Tokens = tuple[int, ...]
Prefix = tuple[str, Tokens]  # a namespace and all tokens up to a position: what one slot stands for


def slots_of(extents: Iterable[Extent]) -> list[int]:
    return [slot for start, length in extents for slot in range(start, start + length)]


def token_array(tokens: Iterable[int]) -> TokenIds:
    return np.fromiter(tokens, np.int32)


@dataclass
class CachedToken:
    slot: int
    last_step: int
    order: int  # number of the insertion that brought it


@dataclass
class PrefixModel:
    """Every cached prefix by name. A prefix is there only if all shorter ones are."""

    cached: dict[Prefix, CachedToken] = field(default_factory=dict)
    locks: list[Prefix] = field(default_factory=list)
    num_insertions: int = 0

    def match(self, namespace: str, tokens: Tokens) -> list[CachedToken]:
        found: list[CachedToken] = []
        while len(found) < len(tokens) and (entry := self.cached.get((namespace, tokens[: len(found) + 1]))):
            found.append(entry)
        return found

    def use(self, namespace: str, tokens: Tokens, now_step: int) -> list[int]:
        found = self.match(namespace, tokens)
        for entry in found:
            entry.last_step = now_step
        return [entry.slot for entry in found]

    def insert(self, namespace: str, tokens: Tokens, slots: list[int], now_step: int) -> int:
        matched = len(self.use(namespace, tokens, now_step))
        self.num_insertions += 1
        for end in range(matched + 1, len(tokens) + 1):
            self.cached[namespace, tokens[:end]] = CachedToken(slots[end - 1], now_step, self.num_insertions)
        return matched

    def evictable(self) -> set[Prefix]:
        locked = {(namespace, tokens[:end]) for namespace, tokens in self.locks for end in range(len(tokens) + 1)}
        return self.cached.keys() - locked

    def evict(self, num: int) -> list[int]:
        """Token by token, the least recently used end of a sequence each time, the oldest insertion among equals."""
        freed: list[int] = []
        evictable = self.evictable()
        while len(freed) < num and evictable:
            inner = {(namespace, tokens[:-1]) for namespace, tokens in self.cached}
            victim = min(evictable - inner, key=lambda p: (self.cached[p].last_step, self.cached[p].order))
            evictable.remove(victim)
            freed.append(self.cached.pop(victim).slot)
        return freed

    def block_hashes(self, block_size: int) -> set[int]:
        return {
            block_hashes(namespace, pack_int32(tokens), block_size)[-1]
            for namespace, tokens in self.cached
            if len(tokens) % block_size == 0
        }


class TreeWorld:
    """A small pool and tree beside their model: every method does one thing to both and compares the answers."""

    BLOCK_SIZE = 3

    def __init__(self, num_slots: int) -> None:
        self.pool = SlotPool(num_slots)
        self.tree = RadixTree(block_size=self.BLOCK_SIZE)
        self.model = PrefixModel()
        self.held: list[RadixNode] = []  # locked nodes, beside model.locks
        self.router: set[int] = set()  # what the events so far say is cached
        self.now_step = 0
        self.known: list[Tokens] = [()]

    def tokens(self, seed: int, cut: int, more: Iterable[int]) -> Tokens:
        """A part of an earlier sequence, continued: so that prefixes are shared."""
        tokens = (*self.known[seed % len(self.known)][:cut], *more)
        self.known = [*self.known[-7:], tokens]
        return tokens

    def tick(self) -> None:
        self.now_step += 1

    def match(self, namespace: str, tokens: Tokens, limit: int, lock: bool) -> None:
        array = token_array(tokens)
        expected = self.model.use(namespace, tokens[:limit], self.now_step)
        assert self.tree.match_len(namespace, array, limit) == len(expected)
        match = self.tree.match_prefix(namespace, array, limit, self.now_step)
        assert match.length == len(expected)
        assert slots_of(match.extents) == expected
        if lock:
            self._lock(match.node, (namespace, tokens[: match.length]))

    def insert(self, namespace: str, tokens: Tokens, lock: bool) -> None:
        """Tokens computed without looking at the cache: what was there already is a duplicate to free."""
        own = self._allocate(len(tokens))
        if own is None:
            return
        expected = self.model.insert(namespace, tokens, slots_of(own), self.now_step)
        insertion = self.tree.insert(namespace, token_array(tokens), own, self.now_step)
        assert insertion.matched == expected
        assert slots_of(insertion.extents) == [entry.slot for entry in self.model.match(namespace, tokens)]
        self.pool.free(slice_extents(own, 0, insertion.matched))
        if lock:
            self._lock(insertion.node, (namespace, tokens))

    def unlock(self, seed: int) -> None:
        if self.held:
            index = seed % len(self.held)
            del self.model.locks[index]
            self.tree.unlock(self.held.pop(index))

    def evict(self, num: int) -> None:
        expected = self.model.evict(num)
        freed = self.tree.evict(num)
        assert sorted(slots_of(freed)) == sorted(expected)
        self.pool.free(freed)

    def clear_unlocked(self) -> None:
        expected = [self.model.cached.pop(prefix).slot for prefix in self.model.evictable()]
        freed = self.tree.clear_unlocked()
        assert sorted(slots_of(freed)) == sorted(expected)
        self.pool.free(freed)

    def reset(self) -> None:
        self.tree.reset()
        self.pool = SlotPool(self.pool.num_slots)
        self.model = PrefixModel()
        self.held.clear()

    def take_events(self) -> None:
        delta = self.tree.take_events()
        if delta.cleared:
            self.router.clear()
        assert self.router.issuperset(delta.removed)
        self.router.difference_update(delta.removed)
        assert self.router.isdisjoint(delta.stored)
        self.router.update(delta.stored)
        assert self.router == self.model.block_hashes(self.BLOCK_SIZE)

    def check(self) -> None:
        self.pool.check_invariants()
        self.tree.check_invariants()
        assert self.tree.num_slots == len(self.model.cached)
        assert self.tree.num_evictable_slots == len(self.model.evictable())
        cached = slots_of(self.tree.held_extents())
        assert sorted(cached) == sorted(entry.slot for entry in self.model.cached.values())
        assert sorted(cached + slots_of(self.pool.free_extents())) == list(range(self.pool.num_slots))
        assert set(self.tree.all_hashes()) == self.model.block_hashes(self.BLOCK_SIZE)

    def _lock(self, node: RadixNode, prefix: Prefix) -> None:
        self.tree.lock(node)
        self.held.append(node)
        self.model.locks.append(prefix)

    def _allocate(self, num: int) -> Extents | None:
        """Slots for a computation, evicting if need be; None when locks leave too few."""
        if num > self.pool.num_free:
            self.evict(num - self.pool.num_free)
        if num > self.pool.num_free:
            free = self.pool.num_free
            try:
                self.pool.allocate(num)
            except OutOfSlots as error:
                assert (error.wanted, error.free) == (num, free)
                return None
            raise AssertionError("more slots than there are")
        own: Extents = []
        extend(own, self.pool.allocate(num))
        assert total(own) == num
        return own
