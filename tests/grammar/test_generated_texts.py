"""Whatever a grammar lets through is valid: random walks over the masks, judged by an independent validator."""

import json
import random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from shared.messages.constraints import ConstraintRefused, JsonSchema
from tests.support.grammars import answer
from tests.support.schemas import is_valid, schemas

MAX_TOKENS = 600
CLOSING = frozenset(b'"}]')


def walk(tokenizer, grammar: str, seed: int) -> str | None:
    """A random text of the language, or None when it did not end in time. Leans towards the end, or it seldom comes."""
    rng = random.Random(seed)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    text: list[int] = []
    for _ in range(MAX_TOKENS):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i // 8] >> (i % 8) & 1]
        assert allowed, matcher.get_error()
        if tokenizer.eos_token in allowed and (len(allowed) == 1 or rng.random() < 0.7):
            return tokenizer.decode_bytes(text).decode()
        allowed.remove(tokenizer.eos_token) if tokenizer.eos_token in allowed else None
        closing = [i for i in allowed if tokenizer.decode_bytes([i])[0] in CLOSING]
        token = rng.choice(closing if closing and rng.random() < 0.3 else allowed)
        assert matcher.consume_token(token), matcher.get_error()
        text.append(token)
    return None


def check(vetter, schema, seed: int) -> None:
    reply = answer(vetter, JsonSchema(schema=schema))
    assume(not isinstance(reply, ConstraintRefused))
    text = walk(vetter.tokenizer, reply.grammar, seed)
    assume(text is not None)
    assert is_valid(schema, json.loads(text)), text
    assert text == text.strip()


@given(schemas, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_text_of_the_grammar_fits_the_schema(vetter, schema, seed):
    check(vetter, schema, seed)


@pytest.mark.slow
@given(schemas, st.integers(0, 2**32))
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_text_of_many_grammars_fits_the_schema(vetter, schema, seed):
    check(vetter, schema, seed)
