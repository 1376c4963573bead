"""The KV pool as the scheduler sees it: which token slots are free, handed out in long runs.

Free slots are kept as maximal runs, once by start to find neighbours and once by length to find the best fit; every
operation costs O(log n) in the number of free runs.
"""

from collections.abc import Iterable

from sortedcontainers import SortedDict, SortedList

from services.scheduler.extents import Extent, Extents


class OutOfSlots(Exception):
    """The pool has fewer free slots than were asked for; nothing was taken. The scheduler's move: evict or retract."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} KV slots wanted, {free} are free")
        self.wanted = wanted
        self.free = free


class SlotPool:
    """Free slots of a pool of `num_slots`, given out as extents and taken back in any pieces.

    The order of allocations and frees decides every address, so a history replays exactly.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 0
        self.num_slots = num_slots
        self.num_free = 0
        self._length_at: SortedDict[int, int] = SortedDict()  # start of a free run -> its length
        self._by_length: SortedList[tuple[int, int]] = SortedList()  # (length, start) of the same runs
        if num_slots:
            self._add_run(0, num_slots)
            self.num_free = num_slots

    def allocate(self, num: int) -> Extents:
        """Take `num` slots: one run of the best fit, or several, largest first, when no run is long enough.

        Raises OutOfSlots and takes nothing when fewer than `num` are free.
        """
        self._require(num)
        taken: Extents = []
        while num > 0:
            fit = self._by_length.bisect_left((num, 0))
            length, start = self._by_length[fit if fit < len(self._by_length) else -1]
            taken.append(self._take(start, min(num, length)))
            num -= taken[-1].length
        return taken

    def allocate_after(self, end: int, num: int) -> Extents:
        """Take `num` slots for a sequence whose last slot is `end - 1`, from the run that begins at `end` if it is free.

        What that run cannot give comes from `allocate`. Raises OutOfSlots and takes nothing when fewer than `num` are free.
        """
        self._require(num)
        length = self._length_at.get(end, 0)
        if num == 0 or length == 0:
            return self.allocate(num)
        grown = self._take(end, min(num, length))
        return [grown, *self.allocate(num - grown.length)]

    def free(self, extents: Iterable[Extent]) -> None:
        """Give slots back, in any pieces and order; runs that touch become one."""
        for start, length in extents:
            self._give_back(start, length)

    def check_invariants(self) -> None:
        """Free runs are in range, apart from each other and known under both orders. O(n) in the number of runs."""
        assert list(self._by_length) == sorted((length, start) for start, length in self._length_at.items())
        assert sum(self._length_at.values()) == self.num_free
        previous_end = -1
        for start, length in self._length_at.items():
            assert length > 0
            assert start > previous_end, f"free runs meet or overlap at slot {start}"
            previous_end = start + length
        assert previous_end <= self.num_slots

    def free_extents(self) -> Extents:
        """Every free run, by start. O(n)."""
        return [Extent(start, length) for start, length in self._length_at.items()]

    def _require(self, num: int) -> None:
        assert num >= 0, f"cannot allocate {num} slots"
        if num > self.num_free:
            raise OutOfSlots(wanted=num, free=self.num_free)

    def _take(self, start: int, num: int) -> Extent:
        """Take the first `num` slots of the free run at `start`: what is left lies behind them, where a tail can grow."""
        length = self._remove_run(start)
        if num < length:
            self._add_run(start + num, length - num)
        self.num_free -= num
        return Extent(start, num)

    def _give_back(self, start: int, length: int) -> None:
        end = start + length
        assert 0 <= start < end <= self.num_slots, f"slots {start}:{end} are not in a pool of {self.num_slots}"
        # Free runs are apart from each other: if a slot is free already, the run before or behind reaches into these.
        starts = self._length_at.keys()
        behind = self._length_at.bisect_left(start)
        next_start = starts[behind] if behind < len(starts) else self.num_slots + 1
        previous_start = starts[behind - 1] if behind > 0 else -1
        previous_end = previous_start + self._length_at.get(previous_start, 0)
        assert previous_end <= start, f"slots {start}:{min(end, previous_end)} are freed twice"
        assert end <= next_start, f"slots {next_start}:{end} are freed twice"
        self.num_free += length
        if end == next_start:
            length += self._remove_run(next_start)
        if previous_end == start:
            length += self._remove_run(previous_start)
            start = previous_start
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._by_length.add((length, start))

    def _remove_run(self, start: int) -> int:
        length: int = self._length_at.pop(start)
        self._by_length.remove((length, start))
        return length
