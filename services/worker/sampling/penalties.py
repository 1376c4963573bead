"""Which tokens a sequence holds, and how often: what presence, frequency and repetition penalties are computed from."""

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of one sequence with the times each was generated; grows by one token at a time.

    Sparse on purpose: a step touches only the logits of tokens that occur, not the whole vocabulary.

    ids     int32 [n]  distinct tokens of prompt and output, in order of first appearance
    counts  int32 [n]  occurrences among the generated tokens; 0 for one that only the prompt holds
    """

    def __init__(self, prompt: NDArray[np.int32], generated: NDArray[np.int32]) -> None:
        distinct = np.unique(prompt)
        self._ids = distinct.astype(np.int32)
        self._counts = np.zeros(len(distinct), np.int32)
        self._size = len(distinct)
        self._index = {token: index for index, token in enumerate(distinct.tolist())}
        for token in generated.tolist():
            self.add(token)

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int32]:
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count one generated token."""
        index = self._index.get(token)
        if index is None:
            index = self._size
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty(max(64, index), np.int32)))
                self._counts = np.concatenate((self._counts, np.zeros(max(64, index), np.int32)))
            self._index[token] = index
            self._ids[index] = token
            self._size += 1
        self._counts[index] += 1
