from hypothesis import given
from hypothesis import strategies as st

from services.grammar.cache import AnswerCache


def test_an_answer_is_found_by_the_content_of_its_question():
    cache = AnswerCache(max_answers=10, max_bytes=1000)
    cache.put(cache.key(b"question"), b"answer")
    assert cache.get(cache.key(b"question"), now_ms=0) == b"answer"
    assert cache.get(cache.key(b"another"), now_ms=0) is None


def test_the_longest_unused_answer_goes_first():
    cache = AnswerCache(max_answers=2, max_bytes=1000)
    cache.put(b"a", b"1")
    cache.put(b"b", b"2")
    cache.get(b"a", now_ms=0)
    cache.put(b"c", b"3")
    assert [cache.get(key, now_ms=0) for key in (b"a", b"b", b"c")] == [b"1", None, b"3"]


def test_an_answer_may_hold_for_a_while_only():
    cache = AnswerCache(max_answers=2, max_bytes=1000)
    cache.put(b"a", b"1", until_ms=100)
    assert cache.get(b"a", now_ms=99) == b"1"
    assert cache.get(b"a", now_ms=100) is None
    assert cache.num_bytes == 0


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.binary(max_size=40), st.booleans())))
def test_number_and_bytes_stay_bounded(operations):
    cache = AnswerCache(max_answers=3, max_bytes=60)
    for now_ms, (key, answer, expires) in enumerate(operations):
        cache.put(key, answer, until_ms=now_ms + 2 if expires else None)
        cache.get(b"a", now_ms)
        assert len(cache) <= 3
        assert cache.num_bytes <= 60
