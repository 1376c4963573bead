"""Whatever a grammar lets through is valid: random walks over the masks, judged by an independent validator."""

import json
import random

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from shared.messages.constraints import ConstraintRefused, JsonSchema
from tests.support.grammars import answer

MAX_TOKENS = 600
CLOSING = frozenset(b'"}]')

bounds = st.integers(-50, 50)
sizes = st.integers(0, 4)
names = st.sampled_from(["a", "b", "key", "é", 'quo"te', "x y"])
literals = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.sampled_from([0.5, -1.25, 1e-3]), st.text(max_size=4)
)


def optional(**fields):
    return st.fixed_dictionaries({}, optional=fields)


def ranged(low: str, high: str, values):
    return st.tuples(values, values).map(lambda pair: {low: min(pair), high: max(pair)})


strings = st.one_of(
    ranged("minLength", "maxLength", sizes),
    st.sampled_from(["^[a-c]+$", "x", r"^\d{2,3}$", "^(?:ab|c)?$", r"^\S+\s\S+$"]).map(lambda p: {"pattern": p}),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(lambda f: {"format": f}),
    st.just({}),
).map(lambda extra: {"type": "string", **extra})
numbers = st.tuples(
    st.sampled_from(["integer", "number"]),
    st.one_of(
        ranged("minimum", "maximum", bounds), ranged("exclusiveMinimum", "exclusiveMaximum", bounds), st.just({})
    ),
    optional(multipleOf=st.sampled_from([1, 2, 0.5, 7])),
).map(lambda parts: {"type": parts[0], **parts[1], **parts[2]})
leaves = st.one_of(
    strings,
    numbers,
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"], "maxLength": 2}]),
    st.lists(literals, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    literals.map(lambda value: {"const": value}),
)


def _objects(children):
    return st.tuples(
        st.dictionaries(names, children, max_size=4),
        st.lists(names, max_size=2, unique=True),
        st.sampled_from(
            [{"additionalProperties": False}, {}, {"additionalProperties": {"type": "integer"}}, {"maxProperties": 2}]
        ),
    ).map(lambda parts: {"type": "object", "properties": parts[0], "required": parts[1], **parts[2]})


def _arrays(children):
    return st.tuples(
        ranged("minItems", "maxItems", sizes),
        optional(items=children, prefixItems=st.lists(children, min_size=1, max_size=2)),
    ).map(lambda parts: {"type": "array", **parts[0], **parts[1]})


def _compounds(children):
    return st.one_of(
        _objects(children),
        _arrays(children),
        st.lists(children, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        st.lists(children, min_size=1, max_size=2).map(lambda branches: {"allOf": branches}),
        st.lists(children, min_size=2, max_size=2).map(lambda branches: {"oneOf": branches}),
        children.map(
            lambda child: {"$defs": {"x": child}, "type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 2}
        ),
    )


schemas = st.recursive(leaves, _compounds, max_leaves=8)


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


def is_valid(schema, instance) -> bool:
    checker = jsonschema.FormatChecker(formats=["date", "ipv4", "email", "uuid"])
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(instance)


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
