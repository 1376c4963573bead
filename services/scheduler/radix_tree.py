"""The prefix cache: which token sequences have their keys and values in which KV slots.

A radix tree over token ids, matched token by token. Each namespace has a root of its own, so its requests share prefixes with
each other and with nobody else. The tree owns the slots it was given until `evict` or `clear_unlocked` returns them; a request
that reads them holds a lock on the node where its prefix ends. The cost of a call grows with the nodes on one path, never with
the size of the tree.
"""

from collections.abc import Iterator
from typing import NamedTuple

from services.scheduler.eviction import EvictionPolicy, EvictionQueue, lru
from services.scheduler.extents import Extents, extend, slice_extents, total
from services.scheduler.kv_hashes import KvDelta, KvLedger
from services.scheduler.radix_node import TOKEN_DTYPE, RadixNode, TokenIds, common_prefix_len
from shared.kv_hashes import DEFAULT_BLOCK_SIZE, block_hashes, chain_hashes, namespace_hash
from shared.messages.packing import INT32_BYTES

__all__ = ["Insertion", "KvDelta", "Match", "RadixNode", "RadixTree"]


class Match(NamedTuple):
    """The longest cached prefix: where it ends, how many tokens it has, the slots that hold them."""

    node: RadixNode
    length: int
    extents: Extents


class Insertion(NamedTuple):
    """Where the inserted tokens end, how many of them were there before, and the slots the tree holds for all of them."""

    node: RadixNode
    matched: int
    extents: Extents


class RadixTree:
    """Cached prefixes of all namespaces, with locks, eviction and a record of changes for routers.

    num_slots            slots of all nodes
    num_evictable_slots  those on which no request stands
    version              rises whenever the answer of a match may have changed

    Steps passed as `now_step` never fall.
    """

    def __init__(self, policy: EvictionPolicy = lru, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        self.num_slots = 0
        self.num_evictable_slots = 0
        self.version = 0
        self._block_size = block_size
        self._roots: dict[str, RadixNode] = {}  # namespaces with at least one node
        self._nowhere = _new_root("")  # where a match ends in a namespace without nodes
        self._num_inserted = 0
        self._queue = EvictionQueue(policy)
        self._ledger = KvLedger()

    def match_len(self, namespace: str, tokens: TokenIds, limit: int | None = None) -> int:
        """How many of the first `limit` tokens are cached. Changes nothing: for policies that compare requests."""
        return self._descend(namespace, tokens[:limit])[2]

    def match_prefix(self, namespace: str, tokens: TokenIds, limit: int, now_step: int) -> Match:
        """Find the longest cached prefix of `tokens[:limit]` and mark it as used; lock its node before the next eviction.

        A node in which the match ends is split, so that the lock will hold the matched tokens and no others.
        """
        assert limit >= 0
        node, length = self._reach(namespace, tokens[:limit])
        return Match(node, length, self._use(node, now_step))

    def insert(self, namespace: str, tokens: TokenIds, extents: Extents, now_step: int) -> Insertion:
        """Cache `tokens`, whose keys and values lie in `extents` (as many slots as tokens).

        The tree becomes the owner of the slots at positions from `matched` on. For positions below it the tree keeps the slots
        it has: where the caller's differ they are duplicates, and freeing them is the caller's part.
        """
        assert total(extents) == len(tokens), f"{total(extents)} slots for {len(tokens)} tokens"
        node, matched = self._reach(namespace, tokens)
        held = self._use(node, now_step)
        if matched < len(tokens):
            if node is self._nowhere:
                node = self._roots[namespace] = _new_root(namespace)
            node = self._add_leaf(node, tokens, slice_extents(extents, matched, len(tokens)), now_step)
            extend(held, node.extents)
        return Insertion(node, matched, held)

    def lock(self, node: RadixNode) -> None:
        """A request stands on `node`: nothing from the root to its end may go. Each lock takes one `unlock`."""
        while node.parent is not None:
            if node.lock_ref == 0:
                self.num_evictable_slots -= len(node)
            node.lock_ref += 1
            node = node.parent
        assert not node.packed, "the node was evicted before it was locked"
        node.lock_ref += 1

    def unlock(self, node: RadixNode) -> None:
        """A request leaves `node`, on which it called `lock`."""
        last = node
        while node.parent is not None:
            assert node.lock_ref > 0, "unlocked more often than locked"
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.num_evictable_slots += len(node)
            node = node.parent
        assert not node.packed, "the node was evicted under a lock"
        assert node.lock_ref > 0, "unlocked more often than locked"
        node.lock_ref -= 1
        if last.is_evictable_leaf:
            self._queue.push(last)

    def evict(self, num: int) -> Extents:
        """Drop `num` tokens, fewer only if no more are evictable, and return their slots.

        Leaves go in the order of the policy. The last one is cut at its tail if that is enough: a prefix is still a prefix.
        """
        freed: Extents = []
        missing = num
        while missing > 0 and (leaf := self._queue.pop()) is not None:
            keep = max(0, len(leaf) - missing)
            missing -= len(leaf) - keep
            extend(freed, self._cut_tail(leaf, keep))
        if freed:
            self.version += 1
        return freed

    def clear_unlocked(self) -> Extents:
        """Drop every prefix on which no request stands and return the slots."""
        freed: Extents = []
        for node in [node for node in self.nodes() if node.lock_ref == 0]:
            extend(freed, node.extents)
            self._ledger.remove(node.hashes)
            _detach(node)
        self._roots = {namespace: root for namespace, root in self._roots.items() if root.children}
        self._queue.clear()  # what is left is locked
        self.num_slots -= self.num_evictable_slots
        self.num_evictable_slots = 0
        if freed:
            self.version += 1
        return freed

    def reset(self) -> None:
        """Forget everything, locks included: the pool is another one now. Nodes from before must not be used again."""
        self._queue.clear()
        self._roots.clear()
        self._nowhere = _new_root("")
        self.num_slots = 0
        self.num_evictable_slots = 0
        self.version += 1
        self._ledger.clear()

    def take_events(self) -> KvDelta:
        """What changed since the last call, as names of blocks. A block counts while its last token is in the tree."""
        return self._ledger.take()

    def all_hashes(self) -> list[int]:
        """Names of all blocks in the tree: what a router knows that has applied every delta. O(n)."""
        return [block for node in self.nodes() for block in node.hashes]

    def held_extents(self) -> Extents:
        """The slots of every node. O(n), for accounting at idle and in tests."""
        return [extent for node in self.nodes() for extent in node.extents]

    def check_invariants(self) -> None:
        """Everything that must hold between calls. O(n), for tests and idle moments."""
        num_slots = num_evictable_slots = 0
        for namespace, root in self._roots.items():
            assert root.children, f"namespace {namespace!r} has an empty root"
            assert not root.packed
            assert root.parent is None
        for node in self.nodes():
            assert node.parent is not None
            assert node.parent.children[node.first_token] is node
            assert len(node) == total(node.extents) > 0
            assert node.start == node.parent.end
            assert node.parent.lock_ref >= node.lock_ref >= sum(child.lock_ref for child in node.children.values())
            assert node.last_step <= node.parent.last_step or not node.parent.packed
            assert node.queued or not node.is_evictable_leaf
            num_slots += len(node)
            num_evictable_slots += len(node) if node.lock_ref == 0 else 0
        assert (self.num_slots, self.num_evictable_slots) == (num_slots, num_evictable_slots)
        self._queue.check_invariants()
        self._check_hashes()

    def _check_hashes(self) -> None:
        for namespace, root in self._roots.items():
            paths: list[tuple[RadixNode, bytes, list[int]]] = [(root, b"", [])]
            while paths:
                node, tokens, hashes = paths.pop()
                tokens, hashes = tokens + node.packed, hashes + node.hashes
                assert hashes == block_hashes(namespace, tokens, self._block_size)
                paths.extend((child, tokens, hashes) for child in node.children.values())

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the roots, each before its children, in an order that replays."""
        for root in self._roots.values():
            pending = list(root.children.values())
            while pending:
                node = pending.pop()
                yield node
                pending.extend(node.children.values())

    def _descend(self, namespace: str, tokens: TokenIds) -> tuple[RadixNode, RadixNode | None, int]:
        """Walk down as far as `tokens` go: the last node matched whole, the node matched in part, the number of tokens."""
        assert tokens.dtype == TOKEN_DTYPE
        node = self._roots.get(namespace, self._nowhere)
        packed = tokens.tobytes() if node.children else b""
        length, num = 0, len(tokens)
        while length < num:
            child = node.children.get(tokens.item(length))
            if child is None:
                break
            if not packed.startswith(child.packed, length * INT32_BYTES):
                return node, child, length + common_prefix_len(child.tokens, tokens[length:])
            node = child
            length = node.end
        return node, None, length

    def _reach(self, namespace: str, tokens: TokenIds) -> tuple[RadixNode, int]:
        """The node that ends where the match of `tokens` ends, made by a split if need be, and the number of tokens."""
        node, partly, length = self._descend(namespace, tokens)
        return (node if partly is None else self._split(partly, length), length)

    def _use(self, node: RadixNode, now_step: int) -> Extents:
        """Mark the path to `node` as used now and return its slots from the root on."""
        path = []
        while node.parent is not None:
            node.last_step = now_step
            node.num_matches += 1
            path.append(node)
            node = node.parent
        extents: Extents = []
        for node in reversed(path):
            extend(extents, node.extents)
        return extents

    def _split(self, node: RadixNode, end: int) -> RadixNode:
        """Cut `node` so that its upper part ends at `end`, and return that part.

        `node` stays the lower part: whoever holds a lock on it stands at its end.
        """
        parent = node.parent
        assert parent is not None
        num = end - node.start
        num_hashes = end // self._block_size - node.start // self._block_size
        upper = RadixNode(
            namespace=node.namespace,
            packed=node.packed[: num * INT32_BYTES],
            extents=slice_extents(node.extents, 0, num),
            parent=parent,
            end=end,
            order=node.order,
            last_step=node.last_step,
            num_matches=node.num_matches,
            lock_ref=node.lock_ref,
            hashes=node.hashes[:num_hashes],
        )
        node.extents = slice_extents(node.extents, num, len(node))
        node.packed = node.packed[num * INT32_BYTES :]
        node.hashes = node.hashes[num_hashes:]
        node.parent = upper
        upper.children[node.first_token] = node
        parent.children[upper.first_token] = upper
        return upper

    def _add_leaf(self, parent: RadixNode, tokens: TokenIds, extents: Extents, now_step: int) -> RadixNode:
        """Hang the tokens behind the end of `parent` under it as one new leaf, held by `extents`."""
        start = parent.end
        self._num_inserted += 1
        leaf = RadixNode(
            namespace=parent.namespace,
            packed=tokens[start:].tobytes(),
            extents=extents,
            parent=parent,
            end=len(tokens),
            order=self._num_inserted,
            last_step=now_step,
        )
        # The first block that ends here may have begun above: it is hashed from its own beginning.
        unnamed = tokens[start // self._block_size * self._block_size :]
        leaf.hashes = chain_hashes(_last_hash(parent), unnamed.tobytes(), self._block_size)
        parent.children[leaf.first_token] = leaf
        self._ledger.store(leaf.hashes)
        self._queue.push(leaf)
        self.num_slots += len(leaf)
        self.num_evictable_slots += len(leaf)
        self.version += 1
        return leaf

    def _cut_tail(self, leaf: RadixNode, keep: int) -> Extents:
        """Drop all but the first `keep` tokens of an unlocked leaf, and the leaf itself if none is left."""
        assert leaf.lock_ref == 0
        assert not leaf.children
        freed = slice_extents(leaf.extents, keep, len(leaf))
        self.num_slots -= len(leaf) - keep
        self.num_evictable_slots -= len(leaf) - keep
        num_hashes = (leaf.start + keep) // self._block_size - leaf.start // self._block_size
        self._ledger.remove(leaf.hashes[num_hashes:])
        if keep == 0:
            parent = _detach(leaf)
            if parent.is_evictable_leaf:
                self._queue.push(parent)
            elif parent.parent is None and not parent.children:
                del self._roots[parent.namespace]
            return freed
        leaf.extents = slice_extents(leaf.extents, 0, keep)
        leaf.end = leaf.start + keep
        leaf.packed = leaf.packed[: keep * INT32_BYTES]
        leaf.hashes = leaf.hashes[:num_hashes]
        self._queue.push(leaf)
        return freed


def _new_root(namespace: str) -> RadixNode:
    return RadixNode(namespace=namespace, packed=b"", extents=[], parent=None, end=0, order=0, last_step=0)


def _detach(node: RadixNode) -> RadixNode:
    """Take `node` off its parent, which is returned."""
    parent = node.parent
    assert parent is not None
    del parent.children[node.first_token]
    node.parent = None
    return parent


def _last_hash(node: RadixNode) -> int:
    """The name of the last block that ends at or above `node`, the namespace's if there is none."""
    above: RadixNode | None = node
    while above is not None:
        if above.hashes:
            return above.hashes[-1]
        above = above.parent
    return namespace_hash(node.namespace)
