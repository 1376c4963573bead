"""A growing run of token ids."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]


class TokenBuffer:
    """Token ids of one sequence, int32, appended at the end in amortised constant time."""

    __slots__ = ("_length", "_storage")

    def __init__(self, token_ids: bytes) -> None:
        self._storage: TokenArray = np.frombuffer(token_ids, "<i4").astype(np.int32)
        self._length = len(self._storage)

    def __len__(self) -> int:
        return self._length

    def append(self, token_ids: Sequence[int]) -> None:
        end = self._length + len(token_ids)
        if end > len(self._storage):
            grown = np.empty(max(end, 2 * self._length), np.int32)
            grown[: self._length] = self._storage[: self._length]
            self._storage = grown
        self._storage[self._length : end] = token_ids
        self._length = end

    def view(self, start: int = 0, stop: int | None = None) -> TokenArray:
        """int32 [stop - start], sharing memory; appending later does not change it."""
        return self._storage[start : self._length if stop is None else stop]

    def pack(self, start: int = 0, stop: int | None = None) -> bytes:
        return self.view(start, stop).astype("<i4").tobytes()
