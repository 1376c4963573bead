from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.extents import Extent, Extents, extend, pack_extents, slice_extents, total
from tests.support.radix_model import slots_of

extent = st.builds(Extent, st.integers(0, 1000), st.integers(1, 9))


def is_coalesced(extents: Extents) -> bool:
    return all(a.start + a.length != b.start for a, b in pairwise(extents))


@st.composite
def kv_maps(draw: st.DrawFn) -> Extents:
    extents: Extents = []
    for run in draw(st.lists(extent, max_size=6)):
        extend(extents, [run])
    return extents


@given(kv_maps(), st.data())
def test_a_slice_holds_the_slots_of_its_positions(extents: Extents, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, total(extents)))
    start = data.draw(st.integers(0, stop))
    part = slice_extents(extents, start, stop)
    assert slots_of(part) == slots_of(extents)[start:stop]
    assert is_coalesced(part)


@given(kv_maps(), st.integers(1, 5))
def test_a_slice_beyond_the_end_is_a_mistake(extents: Extents, excess: int) -> None:
    with pytest.raises(AssertionError, match="lies beyond"):
        slice_extents(extents, 0, total(extents) + excess)


@given(kv_maps(), kv_maps())
def test_extending_keeps_the_order_of_slots_and_joins_runs_that_meet(extents: Extents, more: Extents) -> None:
    joined = list(extents)
    extend(joined, more)
    assert slots_of(joined) == slots_of(extents) + slots_of(more)
    assert is_coalesced(joined)


@given(kv_maps(), st.data())
def test_a_map_cut_in_two_and_extended_again_is_the_same_map(extents: Extents, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, total(extents)))
    again = slice_extents(extents, 0, cut)
    extend(again, slice_extents(extents, cut, total(extents)))
    assert again == extents


def test_extending_changes_nothing_but_its_first_argument() -> None:
    more = [Extent(4, 2), Extent(20, 1)]
    extents = [Extent(0, 4)]
    extend(extents, more)
    assert extents == [Extent(0, 6), Extent(20, 1)]
    assert more == [Extent(4, 2), Extent(20, 1)]


@given(kv_maps())
def test_packed_extents_are_pairs_of_int32(extents: Extents) -> None:
    pairs = np.frombuffer(pack_extents(extents), "<i4").reshape(-1, 2)
    assert [Extent(*pair) for pair in pairs.tolist()] == extents
