"""The keywords of JSON Schema, by what becomes of them. A keyword in none of these tables is unknown: ignored, with a warning."""

from typing import Final

SCHEMA_DIALECTS: Final = frozenset(
    {
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-04/schema",
        "http://json-schema.org/schema",
    }
)
"""Values of `$schema`, without a trailing `#`. What differs between them is normalised to draft 2020-12."""

ANNOTATIONS: Final = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
        "$vocabulary",
        "discriminator",
        "xml",
        "externalDocs",
    }
)
"""They say nothing about which instances are valid."""

REFUSED: Final = {
    "$dynamicRef": "is not supported",
    "$recursiveRef": "is not supported",
    "extends": "is not supported, use `allOf`",
    "disallow": "is not supported",
    "divisibleBy": "is not supported, use `multipleOf`",
}
"""Assertions that no grammar here enforces, whatever their value."""

TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

IN_PLACE_APPLICATORS: Final = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies")
"""Beside these, what counts as unevaluated depends on the instance."""

SCHEMA_KEYWORDS: Final = frozenset({"additionalProperties"})
SCHEMA_LIST_KEYWORDS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SCHEMA_MAP_KEYWORDS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
COUNT_KEYWORDS: Final = frozenset({"minLength", "maxLength", "minItems", "maxItems", "maxProperties"})
