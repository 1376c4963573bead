"""Messages in flight, delivered in an order that the seed decides: a seed names one exact history."""

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from random import Random
from typing import Any

Send = tuple[str, Any]
"""(target, message)"""
Handler = Callable[[int, Any], Iterable[Send]]
"""(now_ms, message) -> what it sends"""


class World:
    """A virtual clock and network. Order holds per (sender, target); between different pairs the seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ms = 1_000_000
        self._in_flight: list[tuple[int, int, str, str, Any]] = []
        self._num_sent = 0
        self._last_due: dict[tuple[str, str], int] = {}

    def send(self, sender: str, target: str, message: Any, delay_ms: int | None = None) -> None:
        delay_ms = self.random.randrange(1, 9) if delay_ms is None else delay_ms
        due_ms = max(self.now_ms + delay_ms, self._last_due.get((sender, target), 0))
        self._last_due[sender, target] = due_ms
        self._num_sent += 1
        heappush(self._in_flight, (due_ms, self._num_sent, sender, target, message))

    def run(self, actors: Mapping[str, Handler], max_messages: int = 200_000) -> None:
        """Deliver until nothing is in flight."""
        while self._in_flight:
            assert self._num_sent < max_messages, "still busy: a livelock"
            due_ms, _, _, target, message = heappop(self._in_flight)
            self.now_ms = max(self.now_ms, due_ms)
            for receiver, reply in actors[target](self.now_ms, message):
                self.send(target, receiver, reply)
