"""Runs of neighbouring KV slots, and lists of them that say where the tokens of a sequence lie."""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from shared.messages.packing import pack_int32


class Extent(NamedTuple):
    """The slots `start` to `start + length - 1` of the KV pool."""

    start: int
    length: int


Extents = list[Extent]
"""A KV map: the runs in order of position. Runs that continue each other are one run."""


def total(extents: Iterable[Extent]) -> int:
    """How many slots the extents hold, that is how many tokens they have room for."""
    return sum(length for _, length in extents)


def slice_extents(extents: Iterable[Extent], start: int, stop: int) -> Extents:
    """The slots of positions `start` to `stop - 1`, which must lie within `extents`."""
    assert 0 <= start <= stop, f"positions {start}:{stop} are no range"
    taken: Extents = []
    position = 0  # of the first slot of the extent at hand
    for extent in extents:
        if position >= stop:
            break
        end = position + extent.length
        if end > start:
            skip = max(0, start - position)
            taken.append(Extent(extent.start + skip, min(end, stop) - position - skip))
        position = end
    assert position >= stop, f"position {stop} lies beyond the {position} slots at hand"
    return taken


def extend(extents: Extents, more: Extents) -> None:
    """Append `more` in place; if it starts right behind the last slot, the two runs that meet become one."""
    if extents and more:
        last, first = extents[-1], more[0]
        if last.start + last.length == first.start:
            extents[-1] = Extent(last.start, last.length + first.length)
            more = more[1:]
    extents += more


def pack_extents(extents: Iterable[Extent]) -> bytes:
    """Little-endian int32 pairs (start, length), as messages carry them."""
    return pack_int32(chain.from_iterable(extents))
