"""Requests that share a small KV pool, with a memory that shows what was computed into each slot."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.extents import slice_extents
from services.scheduler.kv_cache import KvCache, Placement
from services.scheduler.radix_tree import RadixNode, RadixTree
from tests.support.radix_model import Prefix, Tokens, slots_of, token_array


@dataclass(eq=False)
class Sequence:
    """A running request: its first `num_computed` tokens have their KV in the slots of the placement."""

    namespace: str
    tokens: Tokens
    placement: Placement
    num_computed: int


class CacheWorld:
    """Every method is something that happens to a request; `check` reads all slots as attention would."""

    GROWTH = 4

    def __init__(self, num_slots: int) -> None:
        self.cache = KvCache(num_slots, lambda: RadixTree(block_size=3))
        self.running: list[Sequence] = []
        self.memory: dict[int, Prefix] = {}  # slot -> the tokens whose last one was computed into it
        self.now_step = 0
        self.known: list[Tokens] = [(0,)]

    def tick(self) -> None:
        self.now_step += 1

    def admit(self, namespace: str, seed: int, cut: int, more: Iterable[int], num_spare: int) -> None:
        """A prompt that shares a part of an earlier sequence."""
        tokens = (*self.known[seed % len(self.known)][:cut], *more) or (0,)
        available = self.cache.num_available_slots
        placement = self.cache.place(namespace, token_array(tokens), len(tokens) - 1, num_spare, self.now_step)
        if placement is None:
            assert self.cache.num_available_slots == available
            return
        assert placement.tree_len < len(tokens), "at least the last token is computed"
        self.running.append(Sequence(namespace, tokens, placement, placement.tree_len))
        self._remember(tokens)

    def prefill(self, seed: int, num: int) -> None:
        """A chunk of at most `num` tokens is computed, and cached at once."""
        if sequence := self._pick(seed):
            self._compute(sequence, min(num, len(sequence.tokens) - sequence.num_computed))
            self._commit(sequence)

    def decode(self, seed: int, token: int) -> None:
        """The last token is computed and another one sampled; the sequence is retracted if there is no slot for it."""
        if not (sequence := self._pick(seed)):
            return
        self._compute(sequence, len(sequence.tokens) - sequence.num_computed)
        sequence.tokens = (*sequence.tokens, token)
        if len(sequence.tokens) <= sequence.placement.num_slots:
            return
        if self.cache.grow(sequence.placement, self.GROWTH, 1):
            return
        assert self.cache.num_available_slots == 0
        self.retract(seed)

    def finish(self, seed: int) -> None:
        """What was computed stays cached."""
        if sequence := self._pick(seed):
            self._commit(sequence)
            self._remember(sequence.tokens)
            self.abort(seed)

    def retract(self, seed: int) -> None:
        """As after `finish`, its tokens may come back as a prompt."""
        self.finish(seed)

    def abort(self, seed: int) -> None:
        """What was not committed is lost."""
        if sequence := self._pick(seed):
            self.running.remove(sequence)
            self.cache.release(sequence.placement)

    def flush(self) -> None:
        available = self.cache.num_available_slots
        self.cache.flush()
        assert self.cache.tree.num_evictable_slots == 0
        assert self.cache.num_available_slots == available

    def check(self) -> None:
        self.cache.check_balance()
        self.cache.pool.check_invariants()
        self.cache.tree.check_invariants()
        owned = slots_of(self.cache.pool.free_extents()) + slots_of(self.cache.tree.held_extents())
        for sequence in self.running:
            placement = sequence.placement
            placement.check_invariants()
            owned += slots_of(slice_extents(placement.extents, placement.tree_len, placement.num_slots))
            self._check_memory(sequence)
        assert sorted(owned) == list(range(self.cache.pool.num_slots)), "a slot was lost or has two owners"
        for node in self.cache.tree.nodes():
            path = _path(node)
            tokens = tuple(token for edge in path for token in edge.tokens.tolist())
            slots = slots_of(node.extents)
            for end, slot in zip(range(node.start + 1, node.end + 1), slots, strict=True):
                assert self.memory[slot] == (node.namespace, tokens[:end])

    def _pick(self, seed: int) -> Sequence | None:
        return self.running[seed % len(self.running)] if self.running else None

    def _remember(self, tokens: Tokens) -> None:
        self.known = [*self.known[-15:], tokens]

    def _compute(self, sequence: Sequence, num: int) -> None:
        self._check_memory(sequence)
        slots = slots_of(sequence.placement.extents)
        for position in range(sequence.num_computed, sequence.num_computed + num):
            self.memory[slots[position]] = (sequence.namespace, sequence.tokens[: position + 1])
        sequence.num_computed += num

    def _commit(self, sequence: Sequence) -> None:
        placement = sequence.placement
        before = list(placement.extents)
        changed = self.cache.commit(placement, token_array(sequence.tokens[: sequence.num_computed]), self.now_step)
        unchanged = placement.num_slots if changed is None else changed
        assert slice_extents(placement.extents, 0, unchanged) == slice_extents(before, 0, unchanged)

    def _check_memory(self, sequence: Sequence) -> None:
        slots = slots_of(sequence.placement.extents)
        assert len(slots) == len(set(slots)) >= len(sequence.tokens) - 1
        for position in range(sequence.num_computed):
            assert self.memory[slots[position]] == (sequence.namespace, sequence.tokens[: position + 1])


def _path(node: RadixNode | None) -> list[RadixNode]:
    path: list[RadixNode] = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
