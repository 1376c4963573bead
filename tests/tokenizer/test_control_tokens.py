"""Renaming control tokens changes what clients can spell and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.tokenizer.control_tokens import GuardedTokenizer
from tests.support.tokenizer_models import CORPUS, FAMILIES, PLAIN_ADDED_TOKENS, tokenizer_json

NONCE = "31415926535897932384"
PUBLIC = {family: Tokenizer.from_str(tokenizer_json(family)) for family in FAMILIES}
GUARDED = {family: GuardedTokenizer(tokenizer_json(family), NONCE) for family in FAMILIES}


def texts_for(family: str) -> st.SearchStrategy[str]:
    """Texts with control tokens, pieces of them, and ordinary words."""
    control = sorted(GUARDED[family].control_texts)
    words = [word for line in CORPUS for word in line.split(" ")]
    parts = st.sampled_from([*control, *PLAIN_ADDED_TOKENS, *(text[1:] for text in control), " ", "\n", "<", "<|"])
    return st.lists(parts | st.sampled_from(words) | st.text(max_size=5), max_size=10).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), add_special_tokens=st.booleans())
def test_revealed_text_is_encoded_as_by_the_unmodified_tokenizer(family, data, add_special_tokens):
    text = data.draw(texts_for(family))
    guarded = GUARDED[family]
    (ids,) = guarded.encode([guarded.reveal(text)], add_special_tokens=add_special_tokens)
    assert ids == PUBLIC[family].encode(text, add_special_tokens=add_special_tokens).ids


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_text_that_is_not_revealed_never_becomes_a_control_token(family, data):
    text = data.draw(texts_for(family))
    guarded, public = GUARDED[family], PUBLIC[family]
    (ids,) = guarded.encode([text], add_special_tokens=False)
    unknown = public.token_to_id("<unk>")  # stands for characters that the vocabulary lacks
    control = {public.token_to_id(spelling) for spelling in guarded.control_texts} - {unknown}
    assert not control.intersection(ids)


@pytest.mark.parametrize("family", ["byte_level", "byte_level_ignoring_merges", "sentencepiece"])
@given(data=st.data())
def test_text_that_is_not_revealed_reads_back_as_it_was(family, data):
    text = data.draw(texts_for(family))
    (ids,) = GUARDED[family].encode([text], add_special_tokens=False)
    if "<0x" not in text and "▁" not in text:
        assert GUARDED[family].decode(ids, skip_special_tokens=False) == text


def test_control_tokens_are_those_that_the_file_calls_special():
    assert "<|im_end|>" in GUARDED["byte_level"].control_texts
    assert GUARDED["byte_level"].control_texts.isdisjoint(PLAIN_ADDED_TOKENS)


def test_padding_and_truncation_of_the_file_do_not_apply():
    tokenizer = Tokenizer.from_str(tokenizer_json("byte_level"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    short, long = GuardedTokenizer(tokenizer.to_str(), NONCE).encode(["a", "abcdefg 123"], add_special_tokens=False)
    assert len(short) == 1 < 2 < len(long)


def test_a_file_that_is_no_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        GuardedTokenizer('{"added_tokens": [], "model": {"type": "BPE", "vocab": {}}, "merges": 3}', NONCE)
