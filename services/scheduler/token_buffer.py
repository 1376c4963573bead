"""A growing run of token ids."""

import numpy as np
import numpy.typing as npt

from shared.messages.packing import INT32_BYTES

TokenArray = npt.NDArray[np.int32]


class TokenBuffer:
    """Token ids of one sequence, int32. Appending only takes note; the array is put together when somebody looks."""

    __slots__ = ("_array", "_length", "_new")

    def __init__(self, token_ids: bytes) -> None:
        self._array: TokenArray = np.frombuffer(token_ids, "<i4")
        self._length = len(self._array)
        self._new: list[bytes] = []

    def __len__(self) -> int:
        return self._length

    @property
    def last(self) -> int:
        return int(self.view()[-1])

    def append(self, token_ids: bytes) -> int:
        """Append packed token ids; returns the new length."""
        self._new.append(token_ids)
        self._length += len(token_ids) // INT32_BYTES
        return self._length

    def view(self, start: int = 0, stop: int | None = None) -> TokenArray:
        """int32 [stop - start], read-only, sharing memory; appending later does not change it."""
        if self._new:
            self._array = np.frombuffer(b"".join((self._array.tobytes(), *self._new)), "<i4")
            self._new.clear()
        return self._array[start:stop]

    def pack(self, start: int = 0, stop: int | None = None) -> bytes:
        return self.view(start, stop).tobytes()
