"""A client's JSON Schema becomes one that llguidance enforces exactly, or is refused by keyword and path.

llguidance follows draft 2020-12 closely and refuses most of what it cannot do, but it ignores keywords that it does not know,
takes its own options from inside the schema, reads patterns as Rust does, and loses precision in large numbers. So every keyword
is accounted for here: kept, rewritten into others that mean the same, dropped because it says nothing about validity, or refused.
"""

from typing import Any, Final

from services.grammar.config import Limits
from services.grammar.formats import LIBRARY_FORMATS, PATTERN_FORMATS
from services.grammar.keywords import (
    ANNOTATIONS,
    COUNT_KEYWORDS,
    IN_PLACE_APPLICATORS,
    REFUSED,
    SCHEMA_DIALECTS,
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    SCHEMA_MAP_KEYWORDS,
)
from services.grammar.refusal import Refusal
from services.grammar.schema_values import (
    UNWRITABLE,
    kind_of,
    pointer_step,
    read_natural,
    read_number,
    read_pattern,
    read_types,
    refusal_at,
)

_MISSING: Final = object()
Schema = dict[str, Any] | bool


def normalise(schema: Any, limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """An equivalent schema for llguidance, and warnings. Raises Refusal for what cannot be enforced or is no schema."""
    normaliser = _Normaliser(limits, has_ids=_mentions_id(schema))
    result = normaliser.schema(schema, "#", 0)
    if result is True:
        return {}, normaliser.warnings
    if result is False:
        raise Refusal("the schema `false` allows nothing")
    return result, normaliser.warnings


def _mentions_id(node: Any) -> bool:
    """Whether some schema in there has a name of its own, which references may use."""
    stack = [node]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$id"), str):
                return True
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
    return False


class _Normaliser:
    """One walk over a schema. Paths are JSON pointers from its root, as in `#/properties/a`."""

    def __init__(self, limits: Limits, *, has_ids: bool) -> None:
        self.limits = limits
        self.has_ids = has_ids
        self.warnings: list[str] = []
        self._num_nodes = 0

    def schema(self, schema: Any, path: str, depth: int) -> Schema:
        self._count(path, depth)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Refusal(f"a schema is an object or a boolean, {path} is {kind_of(schema)}")
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword not in ANNOTATIONS:
                self._keyword(schema, keyword, value, result, path, depth)
        return _with_null(result) if schema.get("nullable") is True else result

    def _keyword(
        self, schema: dict[str, Any], keyword: str, value: Any, result: dict[str, Any], path: str, depth: int
    ) -> None:
        """Put into `result` what `keyword` asks for."""
        here = f"{path}/{pointer_step(keyword)}"
        match keyword:
            case "$schema":
                if not isinstance(value, str) or value.rstrip("#") not in SCHEMA_DIALECTS:
                    raise refusal_at(keyword, path, f"names an unknown dialect {value!r}")
            case "$id" | "id" | "$anchor" | "$dynamicAnchor":
                if isinstance(value, str) and keyword != "id":
                    # Without $dynamicRef, which is refused, a dynamic anchor is an anchor.
                    result["$anchor" if keyword == "$dynamicAnchor" else keyword] = value
            case "$ref":
                result["$ref"] = self._reference(value, path)
            case "type":
                result["type"] = read_types(value, path)
            case "enum":
                result["enum"] = self._enum(value, here, depth)
            case "const":
                self._literal(value, here, depth)
                result["const"] = value
            case "pattern":
                _add_pattern(result, read_pattern(value, keyword, path))
            case "format":
                self._format(schema, value, result, path)
            case "items" | "additionalItems":
                self._items(schema, keyword, value, result, path, depth)
            case "exclusiveMinimum" | "exclusiveMaximum" | "minimum" | "maximum":
                _bound(schema, keyword, value, result, path)
            case "required":
                if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
                    raise refusal_at(keyword, path, "must be a list of strings")
                result["required"] = list(dict.fromkeys(value))
            case "minProperties":
                _min_properties(schema, value, result, path)
            case "uniqueItems":
                if value is True and not _at_most_one_item(schema):
                    raise refusal_at(keyword, path, "cannot be enforced")
            case "propertyNames":
                self._property_names(schema, value, result, path, depth)
            case "unevaluatedProperties" | "unevaluatedItems":
                self._unevaluated(schema, keyword, value, result, path, depth)
            case "not":
                if value is not False:
                    raise refusal_at(keyword, path, "cannot be enforced")
            case "if":
                if "then" in schema or "else" in schema:
                    raise refusal_at("if/then/else", path, "cannot be enforced")
            case "contains":
                if schema.get("minContains") != 0 or "maxContains" in schema:
                    raise refusal_at(keyword, path, "cannot be enforced")
            case "then" | "else" | "minContains" | "maxContains":
                pass  # means nothing by itself; with `if` or `contains` it is refused there
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                if not isinstance(value, dict) or any(sub not in ([], True, {}) for sub in value.values()):
                    raise refusal_at(keyword, path, "cannot be enforced")
            case "nullable":
                if not isinstance(value, bool):
                    raise refusal_at(keyword, path, "must be a boolean")
            case _ if keyword in REFUSED:
                raise refusal_at(keyword, path, REFUSED[keyword])
            case _ if keyword in SCHEMA_KEYWORDS:
                result.setdefault(keyword, self.schema(value, here, depth + 1))  # propertyNames may have closed it
            case _ if keyword in SCHEMA_LIST_KEYWORDS:
                branches = self._schema_list(value, keyword, path, depth)
                result[keyword] = [*branches, *result.get(keyword, ())]
            case _ if keyword in SCHEMA_MAP_KEYWORDS:
                result[keyword] = self._schema_map(value, keyword, path, depth)
            case _ if keyword in COUNT_KEYWORDS:
                result[keyword] = read_natural(value, keyword, path)
            case "multipleOf":
                result[keyword] = read_number(value, keyword, path)
                if result[keyword] <= 0:
                    raise refusal_at(keyword, path, "must be above 0")
            case _:
                self.warnings.append(f"unknown keyword `{keyword[:60]}` at {path} is ignored")

    # ---- sub-schemas

    def _schema_list(self, value: Any, keyword: str, path: str, depth: int) -> list[Schema]:
        if not isinstance(value, list | tuple) or not value:
            raise refusal_at(keyword, path, "must be a list of schemas, not empty")
        self._check_alternatives(len(value), keyword, path)
        return [self.schema(branch, f"{path}/{keyword}/{i}", depth + 1) for i, branch in enumerate(value)]

    def _schema_map(self, value: Any, keyword: str, path: str, depth: int) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise refusal_at(keyword, path, "must be an object of schemas")
        self._check_alternatives(len(value), keyword, path)
        result = {}
        for name, sub in value.items():
            sub_path = f"{path}/{keyword}/{pointer_step(name)}"
            key = read_pattern(name, keyword, path) if keyword == "patternProperties" else name
            result[key] = self.schema(sub, sub_path, depth + 1)
        return result

    def _items(
        self, schema: dict[str, Any], keyword: str, value: Any, result: dict[str, Any], path: str, depth: int
    ) -> None:
        """`items` may still be the list of older drafts: then it is `prefixItems`, and `additionalItems` is `items`."""
        is_tuple = isinstance(schema.get("items"), list | tuple)
        if keyword == "items" and not is_tuple:
            result["items"] = self.schema(value, f"{path}/items", depth + 1)
        elif keyword == "items":
            if "prefixItems" in schema:
                raise refusal_at(keyword, path, "is a list beside `prefixItems`")
            if value:
                result["prefixItems"] = self._schema_list(value, keyword, path, depth)
        elif is_tuple:
            result["items"] = self.schema(value, f"{path}/additionalItems", depth + 1)

    def _property_names(
        self, schema: dict[str, Any], value: Any, result: dict[str, Any], path: str, depth: int
    ) -> None:
        """Names from a list become optional properties, a pattern becomes `patternProperties`; the rest is refused."""
        names = self.schema(value, f"{path}/propertyNames", depth + 1)
        if names is True or names in ({}, {"type": "string"}):
            return
        if "properties" in schema or "patternProperties" in schema:
            raise refusal_at("propertyNames", path, "beside `properties` or `patternProperties` cannot be enforced")
        if names is False:
            names = {"enum": []}
        content = names.keys() - {"type"}
        values = self.schema(schema.get("additionalProperties", True), f"{path}/additionalProperties", depth + 1)
        if content == {"enum"} or content == {"const"}:
            allowed = names["enum"] if "enum" in names else [names["const"]]
            result["properties"] = {name: values for name in allowed if isinstance(name, str)}
        elif content == {"pattern"}:
            result["patternProperties"] = {names["pattern"]: values}
        else:
            raise refusal_at("propertyNames", path, "cannot be enforced, except by `enum`, `const` or `pattern`")
        result["additionalProperties"] = False

    def _unevaluated(
        self, schema: dict[str, Any], keyword: str, value: Any, result: dict[str, Any], path: str, depth: int
    ) -> None:
        """Without applicators beside it, what is unevaluated is what is additional."""
        if value is True or value == {}:
            return
        if any(applicator in schema for applicator in (*IN_PLACE_APPLICATORS, "contains")):
            raise refusal_at(keyword, path, "beside other applicators cannot be enforced")
        if (
            keyword == "unevaluatedProperties"
            and "additionalProperties" not in schema
            and "propertyNames" not in schema
        ):
            result["additionalProperties"] = self.schema(value, f"{path}/{keyword}", depth + 1)
        elif keyword == "unevaluatedItems" and "items" not in schema:
            result["items"] = self.schema(value, f"{path}/{keyword}", depth + 1)

    # ---- assertions

    def _reference(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise refusal_at("$ref", path, "must be a string")
        if not self.has_ids and not value.startswith("#"):
            raise refusal_at("$ref", path, f"{value[:100]!r} lies outside the schema; other documents are never loaded")
        return value

    def _enum(self, value: Any, path: str, depth: int) -> list[Any]:
        if not isinstance(value, list | tuple) or not value:
            raise Refusal(f"`enum` at {path.removesuffix('/enum')} must be a list, not empty")
        self._check_alternatives(len(value), "enum", path.removesuffix("/enum"))
        for i, item in enumerate(value):
            self._literal(item, f"{path}/{i}", depth + 1)
        return list(value)

    def _literal(self, value: Any, path: str, depth: int) -> None:
        """A value that must appear as written."""
        self._count(path, depth)
        match value:
            case bool() | None:
                pass
            case str():
                if found := UNWRITABLE.search(value):
                    raise Refusal(f"{path} contains the control character {found.group()!r}, which cannot be enforced")
            case int() | float():
                read_number(value, "", path)
            case list() | tuple():
                for i, item in enumerate(value):
                    self._literal(item, f"{path}/{i}", depth + 1)
            case dict():
                for name, item in value.items():
                    self._literal(item, f"{path}/{pointer_step(name)}", depth + 1)
            case _:
                raise Refusal(f"{path} is no JSON value")

    def _format(self, schema: dict[str, Any], value: Any, result: dict[str, Any], path: str) -> None:
        if not isinstance(value, str):
            raise refusal_at("format", path, "must be a string")
        types = schema.get("type", "string")
        if "string" not in ([types] if isinstance(types, str) else types):
            return  # formats constrain strings only; int32, float and the like describe a program's types
        if value in PATTERN_FORMATS:
            _add_pattern(result, PATTERN_FORMATS[value])
        elif value in LIBRARY_FORMATS:
            result["format"] = value
        else:
            known = ", ".join(sorted(LIBRARY_FORMATS | PATTERN_FORMATS.keys()))
            raise refusal_at("format", path, f"{value[:60]!r} is unknown; known formats: {known}")

    # ---- limits

    def _count(self, path: str, depth: int) -> None:
        self._num_nodes += 1
        if depth > self.limits.max_depth:
            raise Refusal(f"the schema is nested deeper than {self.limits.max_depth} levels, at {path[:200]}")
        if self._num_nodes > self.limits.max_nodes:
            raise Refusal(f"the schema has more than {self.limits.max_nodes} parts")

    def _check_alternatives(self, number: int, keyword: str, path: str) -> None:
        if number > self.limits.max_alternatives:
            raise refusal_at(keyword, path, f"has {number} entries, the limit is {self.limits.max_alternatives}")


def _add_pattern(result: dict[str, Any], pattern: str) -> None:
    """`pattern` and `format` may both ask for one."""
    if "pattern" in result:
        result.setdefault("allOf", []).append({"pattern": pattern})
    else:
        result["pattern"] = pattern


def _bound(schema: dict[str, Any], keyword: str, value: Any, result: dict[str, Any], path: str) -> None:
    """Numeric bounds; `exclusiveMinimum: true` beside `minimum` is how draft 4 and OpenAPI 3.0 write them."""
    if isinstance(value, bool) and keyword.startswith("exclusive"):
        return
    strict = "exclusive" + keyword.capitalize()
    if schema.get(strict) is True:
        keyword = strict
    result[keyword] = read_number(value, keyword, path)


def _min_properties(schema: dict[str, Any], value: Any, result: dict[str, Any], path: str) -> None:
    """Distinct names are only certain for required properties: a grammar may write a free name twice."""
    number = read_natural(value, "minProperties", path)
    required = schema.get("required")
    if isinstance(required, list | tuple) and len(set(map(str, required))) >= number:
        return
    if number > 1:
        raise refusal_at("minProperties", path, "above 1 cannot be enforced, except by that many `required` properties")
    result["minProperties"] = number


def _at_most_one_item(schema: dict[str, Any]) -> bool:
    limit = schema.get("maxItems", _MISSING)
    return isinstance(limit, int | float) and limit <= 1


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """What `nullable: true` means in OpenAPI 3.0. Sub-schemas stay at their paths, for references, wherever that is possible."""
    types = schema.get("type")
    if isinstance(types, str) and "enum" not in schema and "const" not in schema:
        return schema | {"type": [types, "null"]} if types != "null" else schema
    named: dict[str, Any] = {key: schema[key] for key in ("$id", "$anchor", "$defs", "definitions") if key in schema}
    others = {key: value for key, value in schema.items() if key not in named}
    branches = others["anyOf"] if others.keys() == {"anyOf"} else [others]
    return {**named, "anyOf": [*branches, {"type": "null"}]}
