"""The one inbox of an actor: filled by synchronous bus callbacks, emptied by the actor's loop, all at once."""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A bounded queue for one consumer.

    `append` answers False when `max_items` wait already: the item is not kept, and the caller says so to its sender
    (a typed refusal, or a counter where silence is right). Nothing is dropped without the caller knowing.
    """

    def __init__(self, max_items: int) -> None:
        assert max_items > 0, f"an inbox holds at least one item, not {max_items}"
        self.max_items = max_items
        self._items: list[T] = []
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def append(self, item: T) -> bool:
        """Add an item from the event loop; False, and not added, when the inbox is full."""
        if len(self._items) >= self.max_items:
            return False
        self._items.append(item)
        self._filled.set()
        return True

    def wake(self) -> None:
        """Let a waiting `take_ready` return although nothing came: a timer is due."""
        self._filled.set()

    async def take_ready(self) -> list[T]:
        """Wait for one item (or `wake`), take all that are there, oldest first. A cancelled wait loses nothing."""
        await self._filled.wait()
        self._filled.clear()
        items, self._items = self._items, []
        return items
