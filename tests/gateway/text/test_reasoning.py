from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.reasoning import Answer, Reasoning, ReasoningParser


def parted(pieces: list[str], *, opened: bool = False) -> tuple[str, str]:
    """Reasoning and answer when `pieces` arrive one by one."""
    parser = ReasoningParser(opened=opened)
    found = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    return tuple("".join(part.text for part in found if isinstance(part, kind)) for kind in (Reasoning, Answer))


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nhm hm\n</think>\n\nYes.\n", False, "hm hm", "Yes.\n"),
        ("\n<think>a < b</think>Yes", False, "a < b", "Yes"),
        ("<think></think>Yes", False, "", "Yes"),
        ("No <think>later</think>", False, "", "No <think>later</think>"),
        ("  plain", False, "", "  plain"),
        ("<thi", False, "", "<thi"),
        ("<think>cut", False, "cut", ""),
        ("<think>cut </thi", False, "cut </thi", ""),
        ("inside</think>Yes", True, "inside", "Yes"),
        ("<think>\ninside</think>Yes", True, "inside", "Yes"),
        (" in", True, "in", ""),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ],
)
def test_thinking_and_answer_are_told_apart_in_any_pieces(text, opened, reasoning, answer):
    assert parted([text], opened=opened) == (reasoning, answer)
    assert parted(list(text), opened=opened) == (reasoning, answer)


PARTS = st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "words", "é"])


@given(parts=st.lists(PARTS, max_size=10), cuts=st.lists(st.integers(0, 60), max_size=20), opened=st.booleans())
def test_the_pieces_do_not_matter(parts, cuts, opened):
    text = "".join(parts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parted([text[a:b] for a, b in pairwise(bounds)], opened=opened) == parted([text], opened=opened)


def test_reasoning_streams_while_it_is_written():
    parser = ReasoningParser()
    assert parser.push("<think>one") == [Reasoning("one")]
    assert parser.push(" two \n</th") == [Reasoning(" two")]
    assert parser.push("ing") == [Reasoning(" \n</thing")]
    assert parser.push("</think> Yes") == [Answer("Yes")]
