"""Random JSON Schemas of every kind that is enforced, and whether a text fits one by an independent validator."""

import json
import random
from typing import Any

import hypothesis
import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Schema = dict[str, Any]

OTHER_PROPERTIES: list[Schema] = [
    {"additionalProperties": False},
    {},
    {"additionalProperties": {"type": "integer"}},
    {"maxProperties": 2},
]

bounds = st.integers(-50, 50)
sizes = st.integers(0, 4)
names = st.sampled_from(["a", "b", "key", "é", 'quo"te', "x y"])
literals = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.sampled_from([0.5, -1.25, 1e-3]), st.text(max_size=4)
)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    return st.fixed_dictionaries({}, optional=fields)


def ranged(low: str, high: str, values: st.SearchStrategy[int]) -> st.SearchStrategy[Schema]:
    return st.tuples(values, values).map(lambda pair: {low: min(pair), high: max(pair)})


details: st.SearchStrategy[Schema] = st.one_of(
    ranged("minLength", "maxLength", sizes),
    st.sampled_from(["^[a-c]+$", "x", r"^\d{2,3}$", "^(?:ab|c)?$", r"^\S+\s\S+$"]).map(lambda p: {"pattern": p}),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(lambda f: {"format": f}),
    st.just({}),
)
strings: st.SearchStrategy[Schema] = details.map(lambda extra: {"type": "string", **extra})
numbers: st.SearchStrategy[Schema] = st.tuples(
    st.sampled_from(["integer", "number"]),
    st.one_of(
        ranged("minimum", "maximum", bounds), ranged("exclusiveMinimum", "exclusiveMaximum", bounds), st.just({})
    ),
    optional(multipleOf=st.sampled_from([1, 2, 0.5, 7])),
).map(lambda parts: {"type": parts[0], **parts[1], **parts[2]})
leaves: st.SearchStrategy[Schema] = st.one_of(
    strings,
    numbers,
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"], "maxLength": 2}]),
    st.lists(literals, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    literals.map(lambda value: {"const": value}),
)


def _objects(children: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(
        st.dictionaries(names, children, max_size=4),
        st.lists(names, max_size=2, unique=True),
        st.sampled_from(OTHER_PROPERTIES),
    ).map(lambda parts: {"type": "object", "properties": parts[0], "required": parts[1], **parts[2]})


def _arrays(children: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(
        ranged("minItems", "maxItems", sizes),
        optional(items=children, prefixItems=st.lists(children, min_size=1, max_size=2)),
    ).map(lambda parts: {"type": "array", **parts[0], **parts[1]})


def _compounds(children: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
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


def is_valid(schema: Schema, instance: Any) -> bool:
    checker = jsonschema.FormatChecker(formats=["date", "ipv4", "email", "uuid"])
    return bool(jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(instance))


def draw_schemas(count: int, seed: int) -> list[Schema]:
    """`count` schemas, no two alike; the same ones for the same seed."""
    drawn: dict[str, Schema] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=8 * count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas)
    def draw(schema: Schema) -> None:
        drawn.setdefault(json.dumps(schema), schema)

    draw()
    assert len(drawn) >= count, f"only {len(drawn)} different schemas"
    # The generator begins with the simplest ones, and varies one for a while before it goes on to another.
    return random.Random(seed).sample(list(drawn.values()), count)
