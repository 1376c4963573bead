"""What is streamed concatenates to what `tokenizers` decodes at once, for every family, split and sequence of ids."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.vocabulary import Vocabulary
from tests.support.default_model import default_model_folder, naughty_strings
from tests.support.tokenizer_models import FAMILIES, tokenizer_json

TOKENIZERS = {family: Tokenizer.from_str(tokenizer_json(family)) for family in FAMILIES}
VOCABULARIES = {family: Vocabulary(tokenizer_json(family)) for family in FAMILIES}
BYTE_IDS = {
    family: [i for i in range(VOCABULARIES[family].size) if len(VOCABULARIES[family].token_bytes(i)) == 1]
    for family in FAMILIES
}


def streamed(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Deltas when `ids` arrive cut at `cuts`."""
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [*(detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)), detokenizer.finish()]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), skip=st.booleans(), cuts=st.lists(st.integers(0, 30), max_size=30))
def test_any_ids_in_any_pieces_read_as_decoded_at_once(family, data, skip, cuts):
    any_id = st.integers(0, VOCABULARIES[family].size + 3)  # logits may be wider than the vocabulary
    ids = data.draw(st.lists(any_id | st.sampled_from(BYTE_IDS[family]), max_size=30))
    deltas = streamed(Detokenizer(VOCABULARIES[family], skip_special_tokens=skip), ids, cuts)
    assert "".join(deltas) == TOKENIZERS[family].decode(ids, skip_special_tokens=skip)
    for delta in deltas:
        delta.encode()


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(max_size=40))
def test_a_text_comes_back_token_by_token(family, text):
    ids = TOKENIZERS[family].encode(text, add_special_tokens=False).ids
    deltas = streamed(Detokenizer(VOCABULARIES[family]), ids, list(range(len(ids))))
    assert "".join(deltas) == TOKENIZERS[family].decode(ids)
    if family.startswith("byte_level"):
        assert "".join(deltas) == text or "<" in text  # "<" may begin a control token, which is skipped


def test_an_unfinished_character_is_held_and_ends_as_replacement():
    vocabulary = VOCABULARIES["byte_level"]
    ids_of = {vocabulary.token_bytes(i): i for i in reversed(range(vocabulary.size))}
    first, second = (ids_of[bytes([byte])] for byte in "é".encode())
    detokenizer = Detokenizer(vocabulary)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([second, first]) == "é"
    assert detokenizer.finish() == "\ufffd"


def test_a_bad_byte_spoils_its_whole_run_of_byte_tokens():
    vocabulary = VOCABULARIES["sentencepiece"]
    ids_of = {vocabulary.piece(i): i for i in range(vocabulary.size)}
    run = [ids_of[f"<0x{byte:02X}>"] for byte in "日".encode() + b"\xff"]
    detokenizer = Detokenizer(vocabulary)
    assert detokenizer.push(run) == ""
    assert detokenizer.push([ids_of["▁the"]]) == "\ufffd" * 4 + " the"


def test_special_tokens_are_shown_where_asked_for():
    vocabulary = VOCABULARIES["byte_level"]
    ids = TOKENIZERS["byte_level"].encode("<|im_start|>a<|im_end|>").ids
    assert Detokenizer(vocabulary).push(ids) == "a"
    assert Detokenizer(vocabulary, skip_special_tokens=False).push(ids) == "<|im_start|>a<|im_end|>"
    assert Detokenizer(vocabulary, keep=vocabulary.ids_of(["<|im_end|>", "no such token"])).push(ids) == "a<|im_end|>"


def test_naughty_strings_come_back_from_the_default_model():
    folder = default_model_folder()
    vocabulary, tokenizer = Vocabulary.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in naughty_strings():
        ids = tokenizer.encode(text).ids
        deltas = streamed(Detokenizer(vocabulary, skip_special_tokens=False), ids, list(range(len(ids))))
        known = [c for c in text if tokenizer.encode(c).ids]  # the vocabulary lacks some control characters
        assert "".join(deltas) == "".join(known)
