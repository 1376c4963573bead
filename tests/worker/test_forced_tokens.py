"""Forced tokens are the tokens of the whole text: what the model would have seen had it been given the text."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from services.worker.matching.matchers import Matchers
from tests.support.default_model import default_model_folder

VOCAB_SIZE = 49152
END = 2
ROLES = ["administrator", "admin", "user"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "role of the person": {"enum": ROLES},
        "tags": {"type": "array", "items": {"type": "string"}},
        "x": {"type": ["number", "null", "boolean"]},
    },
    "required": ["name", "age", "role of the person", "tags", "x"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(
    SCHEMA, defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
)
texts = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"]), max_size=6) | st.sampled_from(
    # Beginnings that some tokenizers join with the quotation mark before them, and ends with the one behind.
    [
        "/usr/bin",
        "$5",
        '"quoted"',
        " leading",
        "trailing ",
        "John Doe",
        "://",
        "{",
        "}",
        "\\n",
        "don't",
        "#1",
        "...",
        ".",
    ]
)
documents = st.tuples(
    texts,
    st.integers(-(10**6), 10**6),
    st.sampled_from(ROLES),
    st.lists(texts, max_size=3),
    st.sampled_from([1.5, -3, None, True, 0]),
).map(lambda values: dict(zip(SCHEMA["required"], values, strict=True)))  # in the order that the grammar writes


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(default_model_folder() / "tokenizer.json"))


def opened(jump_forward: bool) -> Iterator[Matchers]:
    path: Path = default_model_folder() / "tokenizer.json"
    opening = LLTokenizer(str(path), n_vocab=VOCAB_SIZE, eos_token=[END])
    with closing(Matchers(lambda: opening, VOCAB_SIZE, jump_forward=jump_forward)) as matchers:
        matchers.open(GRAMMAR, []).pending.result(timeout=30)  # type: ignore[union-attr]
        yield matchers


@pytest.fixture(scope="module")
def matchers() -> Iterator[Matchers]:
    yield from opened(jump_forward=True)


@pytest.fixture(scope="module")
def stepping_matchers() -> Iterator[Matchers]:
    yield from opened(jump_forward=False)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(document=documents)
def test_between_canonical_tokens_the_forced_ones_are_canonical_too(
    matchers: Matchers, tokenizer: Tokenizer, document: dict[str, Any]
) -> None:
    tokens = tokenizer.encode(json.dumps(document, ensure_ascii=False)).ids
    matcher = matchers.open(GRAMMAR, [])
    position = num_forced = 0
    while position < len(tokens):
        forced = list(matcher.forced)
        if forced:
            assert forced == tokens[position : position + len(forced)]
            matcher.accept_forced(len(forced))
            position += len(forced)
            num_forced += len(forced)
        else:
            matcher.accept(tokens[position])
            position += 1
        assert not matcher.failure
    assert matcher.is_complete
    assert num_forced >= 14


def bits(mask: NDArray[np.int32]) -> NDArray[np.uint8]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(document=documents, others=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30), jump_forward=st.booleans())
def test_a_token_is_allowed_exactly_if_the_mask_has_it(
    matchers: Matchers,
    stepping_matchers: Matchers,
    tokenizer: Tokenizer,
    document: dict[str, Any],
    others: list[int],
    jump_forward: bool,
) -> None:
    matcher = (matchers if jump_forward else stepping_matchers).open(GRAMMAR, [])
    num_drafted = 0
    for token in tokenizer.encode(json.dumps(document, ensure_ascii=False)).ids:
        matcher.fill_masks()
        for place in range(1 + len(matcher.draft)):
            allowed = bits(matcher.masks[place])
            for candidate in {token, END, 0, *others, *np.flatnonzero(allowed)[:20].tolist()}:
                assert matcher.allows(candidate, place) == allowed[candidate]
        behind = bits(matcher.masks[1]).copy() if matcher.draft[:1] == [token] else None
        matcher.accept(token)
        if behind is not None:
            matcher.fill_masks()
            assert (bits(matcher.masks[0]) == behind).all()
            num_drafted += 1
    assert matcher.is_complete
    assert jump_forward or not num_drafted


def test_the_draft_is_the_text_that_is_certain_in_all_but_its_tokens(matchers: Matchers, tokenizer: Tokenizer) -> None:
    matcher = matchers.open(GRAMMAR, [])
    matcher.accept_forced(len(matcher.forced))
    assert (matcher.forced, tokenizer.decode(matcher.draft)) == ([], ' "')
    matcher.accept(matcher.draft[0])
    assert (matcher.forced, matcher.draft) == ([], [])
