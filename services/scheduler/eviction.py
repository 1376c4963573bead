"""Which cached tokens go first when slots are needed."""

from collections.abc import Callable
from heapq import heappop, heappush

from services.scheduler.radix_node import RadixNode

EvictionPolicy = Callable[[RadixNode], tuple[int, ...]]
"""The node with the smallest key goes first, the one inserted first among equals. A node's key must never fall."""


def lru(node: RadixNode) -> tuple[int, ...]:
    """Least recently used first."""
    return (node.last_step,)


def fifo(node: RadixNode) -> tuple[int, ...]:
    """First inserted first, used or not."""
    return (node.order,)


def lfu(node: RadixNode) -> tuple[int, ...]:
    """Least often used first, the least recently used among equals."""
    return (node.num_matches, node.last_step)


class EvictionQueue:
    """The evictable leaves of a radix tree, next victim first.

    A heap that is put right late: a node whose key rose, that was locked or got children keeps its entry, and `pop` finds
    out. Using a cached prefix therefore costs nothing here, and each node has at most one entry.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, int, RadixNode]] = []

    def push(self, node: RadixNode) -> None:
        """Call whenever `node` has become an evictable leaf; harmless if it has an entry already."""
        if not node.queued:
            node.queued = True
            # Parts of a split node share their order, but the upper one becomes a leaf only after `pop` returned the lower
            # one: two entries never tie.
            # The parts of a split node share their order, and never their end.
            heappush(self._heap, (self._policy(node), node.order, -node.end, node))

    def pop(self) -> RadixNode | None:
        """Take the next victim out, None when no leaf can be evicted."""
        while self._heap:
            key, _, _, node = heappop(self._heap)
            node.queued = False
            if not node.is_evictable_leaf:
                continue
            if self._policy(node) == key:
                return node
            self.push(node)  # it was used since: now it stands where it belongs
        return None

    def clear(self) -> None:
        for *_, node in self._heap:
            node.queued = False
        self._heap.clear()

    def check_invariants(self) -> None:
        """No node twice, none that `pop` would meet too late."""
        nodes = [node for *_, node in self._heap]
        assert len({id(node) for node in nodes}) == len(nodes)
        for key, _, _, node in self._heap:
            assert node.queued
            assert key <= self._policy(node)
