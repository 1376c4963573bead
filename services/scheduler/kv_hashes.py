"""What routers must be told about the radix tree: blocks that came and blocks that went, without detours."""

from collections.abc import Iterable
from typing import NamedTuple


class KvDelta(NamedTuple):
    """The way from one state of the tree to a later one: forget all if `cleared`, then drop `removed`, then add `stored`."""

    stored: list[int]
    removed: list[int]
    cleared: bool


class KvLedger:
    """Changes since the last `take`, in the order they happened; a block that came and went again leaves no trace.

    It never holds more than the blocks in the tree now and the blocks in it at the last `take`, so it is bounded even if no
    router listens.
    """

    def __init__(self) -> None:
        # Dicts as ordered sets: the order of hashes in a message must replay.
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._cleared = False

    def store(self, hashes: Iterable[int]) -> None:
        for block in hashes:
            if block in self._removed:
                del self._removed[block]
            else:
                self._stored[block] = None

    def remove(self, hashes: Iterable[int]) -> None:
        for block in hashes:
            if block in self._stored:
                del self._stored[block]
            else:
                self._removed[block] = None

    def clear(self) -> None:
        """Every block went at once."""
        self._stored.clear()
        self._removed.clear()
        self._cleared = True

    def take(self) -> KvDelta:
        delta = KvDelta(list(self._stored), list(self._removed), self._cleared)
        self._stored.clear()
        self._removed.clear()
        self._cleared = False
        return delta
