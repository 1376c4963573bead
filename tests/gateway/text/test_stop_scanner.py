"""Stop strings against a scanner that looks at the whole text."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.stop_scanner import Scan, StopScanner

STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=5)
TEXTS = st.text("ab c", max_size=24)


def scanned(stops: list[str], pieces: list[str]) -> tuple[str, str | None, int]:
    """Text, stop and characters consumed when `pieces` arrive one by one."""
    scanner, text, consumed = StopScanner(stops), "", 0
    for piece in pieces:
        scan = scanner.push(piece)
        text, consumed = text + scan.text, consumed + scan.consumed
        if scan.matched is not None:
            return text, scan.matched, consumed
    return text + scanner.finish(), None, consumed


def expected(stops: list[str], text: str) -> tuple[str, str | None, int]:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, len(text)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@given(stops=STOPS, text=TEXTS, cuts=st.lists(st.integers(0, 24), max_size=24))
def test_the_first_stop_to_complete_ends_the_text_whatever_the_pieces(stops, text, cuts):
    assert scanned(stops, pieces_of(text, cuts)) == expected(stops, text)


@given(stops=STOPS, text=TEXTS)
def test_text_is_held_exactly_while_it_could_become_a_stop(stops, text):
    scanner, released = StopScanner(stops), ""
    for end, character in enumerate(text, 1):
        scan = scanner.push(character)
        released += scan.text
        if scan.matched is not None:
            return
        ends = [text[start:end] for start in range(end + 1)]
        beginning = next(e for e in ends if e == "" or any(stop.startswith(e) for stop in stops))
        assert scanner.held == beginning
        assert released + scanner.held == text[:end]


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["abc", "b"], "xabcd", "xa"),
        (["a", "is"], " The user is a", " The user "),
        (["own fox"], "The quick brown fox", "The quick br"),
        (["abc", "bc"], "xabc", "x"),
        (["aab"], "aaab", "a"),
        (["\nUser:", "Observation:"], "a\nb Obs", "a\nb Obs"),
    ],
)
def test_neither_order_nor_pieces_decide(stops, text, shown):
    for order in permutations(stops):
        assert scanned(list(order), [text])[0] == shown
        assert scanned(list(order), list(text))[0] == shown


def test_a_push_tells_where_in_it_the_stop_ended():
    scanner = StopScanner(["ab"])
    assert scanner.push("xa") == Scan("x", None, 2)
    assert scanner.push("bcd") == Scan("", "ab", 1)


def test_a_stop_that_completes_unarmed_is_text():
    scanner = StopScanner(["ab"])
    assert scanner.push("xab", armed=False) == Scan("xab", None, 3)
    assert scanner.push("ab") == Scan("", "ab", 2)


def test_a_stop_begun_unarmed_may_complete_armed():
    scanner = StopScanner(["ab", "abc"])
    assert scanner.push("ab", armed=False) == Scan("", None, 2)
    assert scanner.push("c") == Scan("", "abc", 1)
