"""Stop strings in text that arrives in pieces: an Aho-Corasick automaton over the stops, one step a character.

Its state is the longest end of the text that begins some stop, which is exactly the text that must be held back.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Scan(NamedTuple):
    """What one push released.

    text      safe to show: no stop begins in it
    matched   the stop that completed, and with it the text's end; None to go on
    consumed  characters of this push up to the end of the stop; all of them when none completed
    """

    text: str
    matched: str | None
    consumed: int


@dataclass(slots=True, eq=False)
class _Node:
    """The text of a path from the root.

    depth    its length
    fallback the node of its longest proper end that also begins a stop; None for the root
    stop     the longest stop that it ends with
    """

    depth: int = 0
    children: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None
    stop: str | None = None


class StopScanner:
    """Finds the stop that completes first in the text; of several that complete together, the longest.

    Neither the order of the stops nor the way the text is cut into pieces makes a difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are non-empty; none at all lets everything pass."""
        assert all(stops), "a stop string is never empty"
        self._root = self._node = _automaton(stops)
        self._held = ""

    @property
    def held(self) -> str:
        """Text that could still become a stop."""
        return self._held

    def push(self, text: str, *, armed: bool = True) -> Scan:
        """Take in the next piece. While not `armed`, stops pass as ordinary text (`min_tokens`); after a match push no more."""
        node = self._node
        for consumed, character in enumerate(text, 1):
            node = _step(node, character)
            if node.stop is None:
                continue
            if armed:
                known = self._held + text[:consumed]
                self._node, self._held = self._root, ""
                return Scan(known[: len(known) - len(node.stop)], node.stop, consumed)
            while not node.children and node.fallback is not None:  # this stop has passed and begins no longer one
                node = node.fallback
        known = self._held + text
        released = len(known) - node.depth
        self._node, self._held = node, known[released:]
        return Scan(known[:released], None, len(text))

    def finish(self) -> str:
        """The text held back, which no longer can become a stop."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _step(node: _Node, character: str) -> _Node:
    while (child := node.children.get(character)) is None:
        if node.fallback is None:
            return node
        node = node.fallback
    return child


def _automaton(stops: Sequence[str]) -> _Node:
    """The root of the trie of `stops`, fallbacks filled in breadth first: a fallback is always nearer to the root."""
    root = _Node()
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for character, child in node.children.items():
            child.fallback = root if node.fallback is None else _step(node.fallback, character)
            if child.stop is None:
                child.stop = child.fallback.stop
            queue.append(child)
    return root
