"""The incremental scanner accepts what Python's json accepts, and rejects as soon as nothing valid can follow."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.json_scanner import Expect, JsonScanner

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=4),
    max_leaves=12,
)


def length_taken(text: str) -> tuple[int, bool]:
    """Characters taken before one is refused or the object is complete, and whether it is complete."""
    scanner = JsonScanner()
    for length, character in enumerate(text):
        if scanner.expect is Expect.NOTHING or not scanner.feed(character):
            return length, scanner.expect is Expect.NOTHING
    return len(text), scanner.expect is Expect.NOTHING


@given(value=st.dictionaries(st.text(max_size=4), JSON), indent=st.none() | st.integers(0, 3), ascii_only=st.booleans())
def test_every_object_is_taken_to_its_last_brace(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert length_taken(text + "}") == (len(text), True)


@given(text=st.text('{}[]",:\\u0019.-+eEtrfalsn \n', max_size=20).map(lambda text: "{" + text))
def test_complete_means_that_json_agrees(text):
    length, complete = length_taken(text)
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError:
        assert not complete
    else:
        assert (length, complete) == (end, True)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("[", 0),
        ("{1", 1),
        ('{"a" 1', 5),
        ('{"a": 01', 7),
        ('{"a": -}', 7),
        ('{"a": 1.}', 8),
        ('{"a": .5', 6),
        ('{"a": 1e}', 8),
        ('{"a": tru}', 9),
        ('{"a": [1,]', 9),
        ('{"a": 1,}', 8),
        ('{"a": [1}', 8),
        ('{"a": "\\x', 8),
        ('{"a": "\\u12g', 11),
        ('{"a": NaN', 6),
    ],
)
def test_the_first_wrong_character_is_refused(text, length):
    assert length_taken(text) == (length, False)
