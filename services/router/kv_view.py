"""What one replica has cached, as far as its numbered events tell: a view that may be stale, but never for long."""

import sys
from array import array
from collections import deque
from collections.abc import Iterable

from shared.messages.cluster import KvEvents, KvSnapshot

MAX_PENDING_EVENTS = 256
"""Events kept while a snapshot is under way; when more arrive the oldest go, and the gap asks for another snapshot."""


class KvView:
    """Hashes of the token blocks in one replica's radix tree.

    Events are numbered from 1 in each epoch. After a gap the view goes on taking in what it hears, as the best guess there is,
    and `is_synced` is False until a snapshot closes the gap. Beyond `max_blocks` the oldest hashes are forgotten: that costs
    affinity, nothing else.
    """

    def __init__(self, max_blocks: int) -> None:
        assert max_blocks > 0
        self.max_blocks = max_blocks
        self.is_synced = False
        self._epoch = -1
        self._number = 0  # of the last message in the view
        self._blocks: dict[int, None] = {}  # in order of arrival: the oldest first
        self._pending: deque[KvEvents] = deque(maxlen=MAX_PENDING_EVENTS)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def enter_epoch(self, epoch: int) -> None:
        """A lease starts with an empty pool; entering the present epoch again changes nothing."""
        if epoch == self._epoch:
            return
        self._epoch, self._number, self.is_synced = epoch, 0, False
        self._blocks.clear()
        self._pending.clear()

    def apply(self, events: KvEvents) -> None:
        """Take in one message; late and doubled ones are dropped."""
        if events.epoch < self._epoch:
            return
        self.enter_epoch(events.epoch)
        if events.first <= self._number:
            return
        follows = events.first == self._number + 1
        if events.cleared or (follows and (self.is_synced or events.first == 1)):
            self.is_synced = True
            self._number = events.first
            self._pending.clear()
        else:
            self.is_synced = False
            self._pending.append(events)
        self._take_in(events)

    def replace(self, snapshot: KvSnapshot) -> None:
        """Start over from a snapshot, then catch up with the events that came while it was under way."""
        if snapshot.epoch < self._epoch:
            return
        self.enter_epoch(snapshot.epoch)
        if self.is_synced and snapshot.number < self._number:
            return
        self._blocks.clear()
        self._add(_unpack_uint64(snapshot.stored))
        self._number, self.is_synced = snapshot.number, True
        pending, self._pending = self._pending, deque(maxlen=MAX_PENDING_EVENTS)
        for events in pending:
            self.apply(events)

    def count_leading(self, hashes: Iterable[int]) -> int:
        """How many of a prompt's block hashes, from its start, are cached without a hole."""
        count = 0
        for block in hashes:
            if block not in self._blocks:
                break
            count += 1
        return count

    def _take_in(self, events: KvEvents) -> None:
        if events.cleared:
            self._blocks.clear()
        for block in _unpack_uint64(events.removed):
            self._blocks.pop(block, None)
        self._add(_unpack_uint64(events.stored))

    def _add(self, blocks: Iterable[int]) -> None:
        self._blocks.update(dict.fromkeys(blocks))
        while len(self._blocks) > self.max_blocks:
            del self._blocks[next(iter(self._blocks))]


def _unpack_uint64(data: bytes) -> "array[int]":
    """uint64 little-endian. Raises ValueError when the length is no multiple of eight."""
    numbers = array("Q")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
