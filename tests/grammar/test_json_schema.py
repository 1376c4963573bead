"""JSON Schema: what is enforced, what is rewritten, and what is refused by name and place."""

import json

import pytest

from shared.messages.constraints import Compiled, JsonObject, JsonSchema
from tests.support.grammars import answer, language, refusal


def schema_language(vetter, schema, **options):
    return language(vetter, JsonSchema(schema=schema, **options))


# ---- rewritten


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, ["[1, 1]"], ["[null]"]),
        ({"type": "array", "items": True, "uniqueItems": True, "maxItems": 1}, ["[]", "[1]"], ["[1, 2]"]),
        ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}], "nullable": True}, ["1", "true", "null"], ['"a"']),
        ({"enum": ["a"], "type": "string", "nullable": True}, ['"a"', "null"], ['"b"']),
        ({"title": "T", "default": 5, "examples": [1], "deprecated": True, "type": "string"}, ['"a"'], ["5"]),
        ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 1}, ['"a"'], ['"ab"', "1"]),
        ({"items": [{"type": "integer"}], "additionalItems": False, "type": "array"}, ["[1]", "[]"], ["[1, 2]"]),
        ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, ["4", "3.5"], ["3", "2"]),
        ({"type": "number", "maximum": 3, "exclusiveMaximum": False}, ["3"], ["4"]),
        ({"type": "string", "minLength": 2.0}, ['"ab"'], ['"a"']),
        ({"type": "integer", "minContains": 2, "then": {"const": 1}, "not": False}, ["5"], ['"a"']),
        (
            {"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False},
            ['{"a": 1}', "{}"],
            ['{"b": 1}'],
        ),
        ({"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"]),
        (
            {"type": "object", "additionalProperties": {"const": 1}, "propertyNames": {"enum": ["a", "b"]}},
            ['{"a": 1}', '{"a": 1, "b": 1}'],
            ['{"c": 1}', '{"a": 2}'],
        ),
        (
            {"propertyNames": {"pattern": "^x"}, "type": "object", "additionalProperties": {"const": 1}},
            ['{"xy": 1}', "{}"],
            ['{"a": 1}', '{"xy": 2}'],
        ),
        ({"type": "object", "required": ["a"], "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        ({"type": "integer", "format": "int32"}, ["5"], ['"5"']),
    ],
)
def test_keywords_that_are_rewritten_mean_the_same(vetter, schema, valid, invalid):
    accepts = schema_language(vetter, schema)
    assert [text for text in valid if not accepts(text)] == []
    assert [text for text in invalid if accepts(text)] == []


def test_keywords_beside_any_of_all_apply(vetter):
    schema = {
        "type": "object",
        "properties": {"modifier": {"type": "string", "maxLength": 5}, "value": {"type": "integer"}},
        "additionalProperties": False,
        "anyOf": [{"required": ["modifier"]}, {"required": ["value"]}],
    }
    accepts = schema_language(vetter, schema)
    assert accepts('{"value": 1}')
    assert accepts('{"modifier": "a", "value": 1}')
    assert not accepts("{}")
    assert not accepts('{"value": 1, "zz": 1}')


def test_text_is_written_as_utf_8_and_counted_in_characters(vetter):
    accepts = schema_language(vetter, {"type": "string", "minLength": 2, "maxLength": 3})
    assert accepts('"🔥🔥🔥"')
    assert not accepts('"🔥"')
    assert not accepts('"🔥🔥🔥🔥"')


def test_an_escaped_name_cannot_pass_as_an_additional_property(vetter):
    accepts = schema_language(vetter, {"type": "object", "properties": {"a": {"type": "integer"}}})
    assert accepts('{"a": 1, "b": "x"}')
    assert not accepts('{"\\u0061": "x"}')


def test_an_option_of_the_library_inside_the_schema_has_no_effect(vetter):
    schema = {"x-guidance": {"lenient": True, "coerce_one_of": True}, "oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}
    assert "oneOf" in refusal(vetter, JsonSchema(schema=schema))


def test_an_unknown_keyword_is_ignored_with_a_warning(vetter):
    reply = answer(vetter, JsonSchema(schema={"type": "object", "properties": {"a": {"maxlength": 3}}}))
    assert isinstance(reply, Compiled)
    assert reply.warnings == ("unknown keyword `maxlength` at #/properties/a is ignored",)


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        ("[[a]b]", ['"ab]"', '"[b]"'], ['"a"']),
        ("^[a&&b]$", ['"&"', '"a"'], ['"c"']),
        ("^.$", ['"a"'], ['"\\n"', '"\\r"', '"\u2028"']),
        (r"^\s$", ['" "', '"\u00a0"'], ['"\u0085"', '"\ufeff"', '"a"']),
        (r"^[^\s]$", ['"a"'], ['" "', '"\u0085"', '"\ufeff"']),
        (r"^[\s\S]$", ['"a"', '" "', '"é"'], ['"ab"']),
        (r"^\d\w$", ['"1a"'], ['"\u0663a"', '"1é"']),
        (r"^\D\W$", ['"a-"'], ['"\u0663-"', '"aé"', '"1-"']),
        (r"^[^\d][^\W]$", ['"aa"'], ['"\u0663a"', '"aé"', '"1a"', '"a-"']),
        (r"^[\w-]+$", ['"a-b_1"'], ['"é"']),
        (r"^\u00e9\x41\ud83d\udd25$", ['"éA🔥"'], ['"eA"']),
        ("^[^]$", ['"a"', '"\\n"'], ['""']),
        ("a/b", ['"xa/b"'], ['"ab"']),
        (r"^\/\-\<$", ['"/-<"'], ['"/-"']),
        ("b$|^a", ['"ax"', '"xb"'], ['"xa"']),
        (r"^(?<year>\d{4})$", ['"2024"'], ['"24"']),
    ],
)
def test_patterns_hold_as_ecma_262_and_python_read_them(vetter, pattern, valid, invalid):
    accepts = schema_language(vetter, {"type": "string", "pattern": pattern})
    assert [text for text in valid if not accepts(text)] == []
    assert [text for text in invalid if accepts(text)] == []


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01"]),
        ("time", ["10:00:00Z", "23:59:59.5+01:00"], ["24:00:00Z", "10:00:00"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-02-29"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("email", ["a@b.cz"], ["a.b"]),
        ("ipv4", ["127.0.0.1"], ["256.0.0.1"]),
    ],
)
def test_formats_are_asserted(vetter, name, valid, invalid):
    accepts = schema_language(vetter, {"type": "string", "format": name})
    assert [text for text in valid if not accepts(json.dumps(text))] == []
    assert [text for text in invalid if accepts(json.dumps(text))] == []


def test_format_and_pattern_both_hold(vetter):
    accepts = schema_language(vetter, {"type": "string", "format": "date", "pattern": "^2021"})
    assert accepts('"2021-01-31"')
    assert not accepts('"2022-01-31"')


# ---- whitespace


def test_json_is_spaced_as_json_dumps_spaces_it(vetter):
    accepts = schema_language(vetter, {"type": "object"})
    assert accepts(json.dumps({"a": [1, {"b": None}], "c": "x"}))
    assert not accepts('{"a":1}')
    assert not accepts('{"a": 1} ')
    assert not accepts('{\n"a": 1}')


def test_compact_json_has_no_spaces(vetter):
    accepts = schema_language(vetter, {"type": "object"}, whitespace="compact")
    assert accepts('{"a":[1,2]}')
    assert not accepts('{"a": 1}')


def test_flexible_whitespace_is_bounded(vetter):
    accepts = schema_language(vetter, {"type": "object"}, whitespace="flexible")
    assert accepts('{\n  "a" : [1,2]\n}')
    assert accepts("{" + " " * 20 + "}")
    assert not accepts("{" + " " * 21 + "}")


def test_an_unknown_style_of_whitespace_is_refused(vetter):
    assert "'wide'" in refusal(vetter, JsonObject(whitespace="wide"))


def test_json_object_is_always_an_object(vetter):
    accepts = language(vetter, JsonObject())
    assert accepts('{"a": [1, 2]}')
    assert accepts("{}")
    assert not accepts("[]")
    assert not accepts("5")


# ---- refused


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "`uniqueItems` at #"),
        ({"type": "object", "properties": {"a/b": {"not": {}}}}, "`not` at #/properties/a~1b"),
        ({"if": {"const": 1}, "then": {"const": 1}}, "if/then/else"),
        ({"dependentRequired": {"a": ["b"]}}, "`dependentRequired`"),
        ({"dependentSchemas": {"a": {"const": 1}}}, "`dependentSchemas`"),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, "`propertyNames`"),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "`oneOf`"),
        ({"type": "array", "contains": {"const": 2}}, "`contains`"),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "`unevaluatedProperties`"),
        ({"type": "string", "format": "color-hex"}, "`format` at # 'color-hex'"),
        ({"type": "string", "format": "unknown"}, "`format`"),
        ({"$dynamicRef": "#a"}, "`$dynamicRef`"),
        ({"type": "string", "pattern": "^(?=.*[a-z]).{8,}$"}, "look-around"),
        ({"type": "string", "pattern": r"(a)\1"}, "back-reference"),
        ({"type": "string", "pattern": r"\bfoo"}, "word boundary"),
        ({"type": "object", "minProperties": 2}, "`minProperties`"),
        ({"type": "integer", "minimum": 2**53 + 1}, "2^53"),
        ({"const": 0.12345678901234567}, "too many digits"),
        ({"const": "a\x00b"}, "control character"),
        ({"$schema": "http://example.com/mine"}, "`$schema`"),
        ({"enum": []}, "`enum`"),
        (False, "false"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(vetter, schema, named):
    assert named in refusal(vetter, JsonSchema(schema=schema))


@pytest.mark.parametrize(
    "reference", ["/$defs/Name", "https://example.com/s.json", "other.json#/x", "#named-anchor", "#/$defs/Nope"]
)
def test_a_reference_that_does_not_resolve_is_refused(vetter, reference):
    schema = {"$ref": reference, "$defs": {"Name": {"type": "string"}}}
    refusal(vetter, JsonSchema(schema=schema))


def test_a_reference_to_itself_is_refused_at_the_first_mask(vetter):
    assert "allows no text" in refusal(
        vetter, JsonSchema(schema={"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    )


@pytest.mark.parametrize(
    "schema",
    [
        5,
        "string",
        None,
        {"type": 123},
        {"type": "strin"},
        {"properties": []},
        {"properties": {"a": 1}},
        {"required": "a"},
        {"items": 5},
        {"minLength": -1},
        {"minLength": True},
        {"minimum": "1"},
        {"minimum": float("nan")},
        {"multipleOf": 0},
        {"anyOf": []},
        {"pattern": 5},
    ],
)
def test_what_is_no_schema_is_refused(vetter, schema):
    refusal(vetter, JsonSchema(schema=schema))


def test_depth_and_number_of_alternatives_are_limited_with_both_numbers(vetter):
    deep: dict = {}
    for _ in range(100):
        deep = {"items": deep}
    assert "64 levels" in refusal(vetter, JsonSchema(schema=deep))
    wide = {"enum": [f"v{i}" for i in range(10_000)]}
    message = refusal(vetter, JsonSchema(schema=wide))
    assert "10000" in message
    assert "4096" in message
