"""One mixed batch as arrays: what a forward pass computes, and where the KV of its rows lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """The next tokens of one sequence.

    token_ids   int [extend_len], not empty: ids to compute now
    start       position of token_ids[0]; so many tokens of the sequence have their KV in the pool already
    extents     int [E, 2] (start, length): the sequence's slots in order of position, at least start + extend_len of them
    num_logits  for how many of the last tokens logits are wanted: 0 none, 1 to sample, more for logprobs of the prompt
    """

    token_ids: NDArray[np.integer] | Sequence[int]
    start: int
    extents: NDArray[np.integer] | Sequence[tuple[int, int]]
    num_logits: int = 1


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """R rows with T new tokens: row i owns token_ids[qo_indptr[i] : qo_indptr[i + 1]]. Arrays lie in host memory.

    token_ids      int64 [T]
    positions      int64 [T]  of each token in its sequence
    slots          int64 [T]  KV slot that takes the token's K and V
    qo_indptr      int32 [R + 1]
    seq_lens       int32 [R]  tokens present after this batch: prefix_len + extend_len
    extents        int32 [E, 2]  (start, length) of the runs that hold the seq_len tokens of each row, exactly
    extent_indptr  int32 [R + 1]  row i owns extents[extent_indptr[i] : extent_indptr[i + 1]]
    logit_index    int64 [S]  indices into T whose logits are wanted, ascending
    """

    token_ids: Int64
    positions: Int64
    slots: Int64
    qo_indptr: Int32
    seq_lens: Int32
    extents: Int32
    extent_indptr: Int32
    logit_index: Int64

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def kv_slots(self) -> tuple[Int32, Int64]:
        """The slot of every token of every row, row after row: int32 [sum of seq_lens]; and int64 [R + 1], where rows begin."""
        return _runs(self.extents[:, 0], self.extents[:, 1]).astype(np.int32), _indptr(self.seq_lens)


def build_batch(rows: Sequence[BatchRow]) -> ForwardBatch:
    """Pack rows in their order; the cost is per row and extent, with numpy's speed per token.

    An empty row, or extents that end before the row's last token, are the caller's mistake and trip an assertion.
    """
    assert rows, "a batch has at least one row"
    starts = np.array([row.start for row in rows], dtype=np.int64)
    extend_lens = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    num_logits = np.array([row.num_logits for row in rows], dtype=np.int64)
    assert (extend_lens > 0).all(), "a row computes at least one token"
    assert (num_logits <= extend_lens).all(), "logits exist only for tokens that are computed"
    seq_lens = starts + extend_lens

    runs = [np.asarray(row.extents, dtype=np.int64).reshape(-1, 2) for row in rows]
    owner = np.repeat(np.arange(len(rows)), [len(run) for run in runs])
    extents = np.concatenate(runs)
    ends = np.cumsum(extents[:, 1])  # in one line of positions where each row's room follows that of the row before
    begins = ends - extents[:, 1]
    room = np.bincount(owner, weights=extents[:, 1], minlength=len(rows)).astype(np.int64)
    assert (room >= seq_lens).all(), "extents end before the row's last token"
    base = np.cumsum(room) - room

    row_of_token = np.repeat(np.arange(len(rows)), extend_lens)
    positions = _runs(starts, extend_lens)
    places = base[row_of_token] + positions
    run_of_token = np.searchsorted(ends, places, side="right")
    used = np.clip(base[owner] + seq_lens[owner] - begins, 0, extents[:, 1])  # without the reserve behind seq_len
    kept = used > 0
    qo_indptr = _indptr(extend_lens)
    return ForwardBatch(
        token_ids=np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows]),
        positions=positions,
        slots=extents[run_of_token, 0] + places - begins[run_of_token],
        qo_indptr=qo_indptr.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        extents=np.stack([extents[kept, 0], used[kept]], axis=1).astype(np.int32),
        extent_indptr=_indptr(np.bincount(owner[kept], minlength=len(rows))).astype(np.int32),
        logit_index=_runs(qo_indptr[1:] - num_logits, num_logits),
    )


def _indptr(lengths: NDArray[np.integer]) -> Int64:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _runs(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> Int64:
    """start, start + 1, ... of each run, run after run: int64 [sum of lengths]."""
    lengths = lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum(), dtype=np.int64)
