"""Rows become one batch of arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.batch import BatchRow, build_batch


def test_a_mixed_batch_packs_rows_one_after_another() -> None:
    batch = build_batch(
        [
            BatchRow([7], 4, [(10, 3), (90, 64)]),  # decodes its fifth token
            BatchRow([1, 2, 3, 4], 2, [(20, 4), (50, 2)], num_logits=2),
            BatchRow([5, 6], 0, [(30, 8)], num_logits=0),
        ]
    )
    assert batch.token_ids.tolist() == [7, 1, 2, 3, 4, 5, 6]
    assert batch.positions.tolist() == [4, 2, 3, 4, 5, 0, 1]
    assert batch.slots.tolist() == [91, 22, 23, 50, 51, 30, 31]
    assert batch.qo_indptr.tolist() == [0, 1, 5, 7]
    assert batch.seq_lens.tolist() == [5, 6, 2]
    assert batch.logit_index.tolist() == [0, 3, 4]


def test_extents_are_cut_to_the_tokens_present() -> None:
    batch = build_batch([BatchRow([7], 4, [(10, 3), (90, 64)]), BatchRow([5, 6], 0, [(30, 8), (60, 4)])])
    assert batch.extents.tolist() == [[10, 3], [90, 2], [30, 2]]
    assert batch.extent_indptr.tolist() == [0, 2, 3]


def test_room_that_ends_before_the_last_token_is_refused() -> None:
    with pytest.raises(AssertionError, match="extents end before"):
        build_batch([BatchRow([1, 2], 3, [(0, 4)])])


@st.composite
def _rows(draw: st.DrawFn) -> list[BatchRow]:
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        extents = draw(st.lists(st.tuples(st.integers(0, 999), st.integers(1, 9)), min_size=1, max_size=5))
        room = sum(length for _, length in extents)
        extend_len = draw(st.integers(1, room))
        start = draw(st.integers(0, room - extend_len))
        num_logits = draw(st.integers(0, extend_len))
        rows.append(BatchRow(list(range(extend_len)), start, extents, num_logits))
    return rows


@given(_rows())
def test_every_token_lies_in_its_own_slot(rows: list[BatchRow]) -> None:
    batch = build_batch(rows)
    table, indptr = batch.kv_slots()
    wanted = []
    for index, row in enumerate(rows):
        slots = [slot for start, length in row.extents for slot in range(start, start + length)]
        seq_len = row.start + len(row.token_ids)
        begin, end = batch.qo_indptr[index : index + 2].tolist()
        assert table[indptr[index] : indptr[index + 1]].tolist() == slots[:seq_len]
        assert batch.slots[begin:end].tolist() == slots[row.start : seq_len]
        assert batch.positions[begin:end].tolist() == list(range(row.start, seq_len))
        wanted += range(end - row.num_logits, end)
    assert batch.logit_index.tolist() == wanted
    assert batch.seq_lens.dtype == batch.extents.dtype == np.int32
