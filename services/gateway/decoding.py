"""From the bytes of a body to a request type: the border of trust. Every refusal names the field, its value and the limit."""

import json
import re
from typing import Any, Generic, TypeVar

import msgspec

from services.gateway.errors import ApiError, invalid, shown

T = TypeVar("T")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LOCATED = re.compile(r"(?P<problem>.*) - at (?:`key` in )?`\$(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]")


class BodyDecoder(Generic[T]):
    """Decodes bodies of one type. Unknown fields are ignored; a wrong type is never converted."""

    def __init__(self, kind: type[T]) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def decode(self, body: bytes) -> T:
        """Raises ApiError (400)."""
        if not body.strip():
            raise invalid(None, "the body is empty, expected a JSON object")
        if body.startswith(_BYTE_ORDER_MARK):
            raise invalid(None, "the body starts with a byte order mark, expected plain UTF-8 JSON")
        try:
            body.decode()  # msgspec does not look into the strings that it skips
            return self._decode(body)
        except UnicodeDecodeError as error:
            raise invalid(None, f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from None
        except RecursionError:
            raise invalid(None, "the body is nested too deeply") from None
        except msgspec.ValidationError as error:
            raise explain(str(error), body) from None
        except msgspec.DecodeError as error:
            raise _malformed(str(error), body) from None


def explain(message: str, body: bytes) -> ApiError:
    """A ValidationError of msgspec, with the field as `param` and the offending value in the text."""
    located = _LOCATED.fullmatch(message)
    problem, path = (located["problem"], located["path"].removeprefix(".")) if located else (message, "")
    if missing := _MISSING.fullmatch(problem):
        return invalid(f"{path}.{missing['name']}" if path else missing["name"], "this field is required")
    problem = problem[:1].lower() + problem[1:]
    if not path:
        return invalid(None, f"the body is not a request: {problem}")
    path = path.removesuffix("[...]")
    value = _value_at(path, body)
    return invalid(path, problem if value is _ABSENT else f"{problem} (the value is {shown(value)})")


_ABSENT = object()


def _value_at(path: str, body: bytes) -> Any:
    """The value at a path such as `messages[0].role`; only for messages, so a second parse is fine."""
    try:
        value = msgspec.json.decode(body)
        for step in _STEP.finditer("." + path):
            value = value[int(step["index"])] if step["index"] else value[step["name"]]
    except (msgspec.DecodeError, LookupError, TypeError, RecursionError):
        return _ABSENT
    return value


def _malformed(message: str, body: bytes) -> ApiError:
    """msgspec takes half a surrogate pair for the end of the input; say what it is."""
    try:
        json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return invalid(None, f"the body is not valid JSON: {message}")
    return invalid(None, "a \\u escape in the body is one half of a surrogate pair, which is no character")


def _refuse_constant(literal: str) -> None:
    raise ValueError(f"{literal} is not JSON")
