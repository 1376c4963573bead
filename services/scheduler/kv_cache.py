"""The KV pool of the worker as the scheduler sees it: free slots, cached slots, and slots private to running requests."""

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.extents import Extents, extend, slice_extents, total
from services.scheduler.radix_tree import RadixNode, RadixTree
from services.scheduler.slot_pool import SlotPool
from services.scheduler.token_buffer import TokenArray


@dataclass(slots=True, eq=False)
class Placement:
    """Where one running sequence's KV lies.

    node       deepest tree node of the prefix it stands on, locked
    tree_len   positions at the front whose slots belong to the tree
    extents    slots of all positions in order: the tree's, then private ones, reserve included
    num_slots  sum of the extents' lengths
    """

    namespace: str
    node: RadixNode
    tree_len: int
    extents: Extents
    num_slots: int

    @property
    def num_private_slots(self) -> int:
        return self.num_slots - self.tree_len

    @property
    def end_slot(self) -> int:
        """The slot behind the last one held: where growing in place would go on."""
        return self.extents[-1].start + self.extents[-1].length if self.extents else 0

    def check_invariants(self) -> None:
        assert total(self.extents) == self.num_slots
        assert 0 <= self.tree_len <= self.num_slots


class KvCache:
    """Owns every slot of one epoch. Invariant: free + tree + private == all, each slot exactly once."""

    def __init__(self, num_slots: int, new_tree: Callable[[], RadixTree]) -> None:
        self.pool = SlotPool(num_slots)
        self.tree = new_tree()
        self.num_private_slots = 0

    @property
    def num_available_slots(self) -> int:
        """Free now or after evicting everything on which no request stands."""
        return self.pool.num_free + self.tree.num_evictable_slots

    @property
    def num_used_slots(self) -> int:
        """On which requests stand: private or locked."""
        return self.num_private_slots + self.tree.num_slots - self.tree.num_evictable_slots

    def place(self, namespace: str, tokens: TokenArray, limit: int, num_spare: int, now_step: int) -> Placement | None:
        """Find the cached prefix (at most `limit` tokens) and slots for all of `tokens` and `num_spare` more.

        Returns None, and changes nothing but the order of eviction, when even evicting cannot free enough.
        """
        match = self.tree.match_prefix(namespace, tokens, limit, now_step)
        # Lock before evicting: the prefix just matched may itself be the oldest leaf.
        self.tree.lock(match.node)
        num_own = len(tokens) - match.length + num_spare
        own = self._allocate(num_own, after=None)
        if own is None:
            self.tree.unlock(match.node)
            return None
        extents = list(match.extents)
        extend(extents, own)
        self.num_private_slots += num_own
        return Placement(namespace, match.node, match.length, extents, len(tokens) + num_spare)

    def grow(self, placement: Placement, num_wanted: int, num_needed: int) -> bool:
        """Add `num_wanted` slots at the end, or `num_needed` if there are no more. False: not even these, nothing changed."""
        assert 0 < num_needed <= num_wanted
        after = placement.end_slot
        num = num_wanted
        own = self._allocate(num, after)
        if own is None:
            num = num_needed
            own = self._allocate(num, after)
            if own is None:
                return False
        extend(placement.extents, own)
        placement.num_slots += num
        self.num_private_slots += num
        return True

    def commit(self, placement: Placement, tokens: TokenArray, now_step: int) -> int | None:
        """Insert `tokens`, whose KV is confirmed, into the tree, and stand on them.

        Where the tree held a part already, its copy replaces ours, which is freed: steps that are under way still read the
        old slots, but run before any step that may write them. Returns the position from which the placement's extents
        have changed, None if they have not.
        """
        start = placement.tree_len
        if len(tokens) <= start:
            return None
        insertion = self.tree.insert(
            placement.namespace, tokens, slice_extents(placement.extents, 0, len(tokens)), now_step
        )
        self.tree.lock(insertion.node)
        self.tree.unlock(placement.node)
        placement.node = insertion.node
        placement.tree_len = len(tokens)
        self.num_private_slots -= len(tokens) - start
        if insertion.matched <= start:
            return None
        # Two requests computed the same tokens side by side: keep one copy.
        duplicates = slice_extents(placement.extents, start, insertion.matched)
        extents = list(insertion.extents)
        extend(extents, slice_extents(placement.extents, len(tokens), placement.num_slots))
        placement.extents = extents
        self.pool.free(duplicates)
        return start

    def release(self, placement: Placement) -> None:
        """Give back everything private and step off the tree; what was committed stays cached."""
        self.pool.free(slice_extents(placement.extents, placement.tree_len, placement.num_slots))
        self.num_private_slots -= placement.num_private_slots
        self.tree.unlock(placement.node)

    def flush(self) -> int:
        """Drop every prefix on which no request stands; returns how many slots that freed."""
        freed = self.tree.clear_unlocked()
        self.pool.free(freed)
        return total(freed)

    def _allocate(self, num: int, after: int | None) -> Extents | None:
        if num == 0:
            return []
        missing = num - self.pool.num_free
        if missing > 0:
            if missing > self.tree.num_evictable_slots:
                return None
            self.pool.free(self.tree.evict(missing))
        return self.pool.allocate(num) if after is None else self.pool.allocate_after(after, num)

    def check_balance(self) -> None:
        """The invariant, from counters: cheap enough for every step."""
        assert self.pool.num_free + self.tree.num_slots + self.num_private_slots == self.pool.num_slots, (
            f"{self.pool.num_free} free + {self.tree.num_slots} cached + {self.num_private_slots} private"
            f" != {self.pool.num_slots} slots"
        )
