import json

import pytest

from services.gateway.text.vocabulary import DecoderKind, Vocabulary
from tests.support.tokenizer_models import CONTROL_TOKENS, FAMILIES, tokenizer_json


def test_each_family_is_recognised_by_its_decoder():
    kinds = {family: Vocabulary(tokenizer_json(family)).kind for family in FAMILIES}
    assert kinds == {
        "byte_level": DecoderKind.BYTE_LEVEL,
        "byte_level_ignoring_merges": DecoderKind.BYTE_LEVEL,
        "sentencepiece_prepending": DecoderKind.BYTE_FALLBACK,
        "sentencepiece": DecoderKind.BYTE_FALLBACK,
        "metaspace_unigram": DecoderKind.METASPACE,
    }


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name():
    description = json.loads(tokenizer_json("byte_level")) | {"decoder": {"type": "CTC"}}
    with pytest.raises(ValueError, match="CTC"):
        Vocabulary(json.dumps(description))


def test_token_bytes_are_what_the_token_adds_to_a_text():
    byte_level, sentencepiece = Vocabulary(tokenizer_json("byte_level")), Vocabulary(tokenizer_json("sentencepiece"))
    (the,) = byte_level.ids_of(["Ġthe"])
    assert byte_level.token_bytes(the) == b" the"
    (the, newline) = (next(iter(sentencepiece.ids_of([piece]))) for piece in ("▁the", "<0x0A>"))
    assert (sentencepiece.token_bytes(the), sentencepiece.token_bytes(newline)) == (b" the", b"\n")
    assert sentencepiece.token_text(next(iter(sentencepiece.ids_of(["<0xFF>"])))) == "\ufffd"


def test_an_unknown_id_has_no_bytes():
    vocabulary = Vocabulary(tokenizer_json("byte_level"))
    assert vocabulary.token_bytes(vocabulary.size) == vocabulary.token_bytes(-1) == b""
    assert vocabulary.piece(vocabulary.size) is None


def test_special_means_what_the_file_calls_special():
    vocabulary = Vocabulary(tokenizer_json("byte_level"))
    assert vocabulary.special_ids == vocabulary.ids_of(CONTROL_TOKENS)
    assert not any(vocabulary.is_special(i) for i in vocabulary.ids_of(["<think>"]))


def test_a_file_and_its_folder_load_alike(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json("byte_level"), encoding="utf-8")
    assert Vocabulary.load(tmp_path).size == Vocabulary.load(tmp_path / "tokenizer.json").size
