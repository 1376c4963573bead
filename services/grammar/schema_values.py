"""What keywords take: numbers, types, names and patterns, checked and read; each complaint names its keyword and place."""

import math
import re
from decimal import Decimal
from typing import Any, Final

from services.grammar.keywords import TYPES
from services.grammar.patterns import rust_pattern
from services.grammar.refusal import Refusal

MAX_EXACT_INTEGER: Final = 2**53
"""Numbers are doubles in llguidance: larger integers are not told from their neighbours."""

MAX_DIGITS: Final = 15
MAX_EXPONENT: Final = 22
"""llguidance reads decimals of this size exactly, and may miss others by the last digit."""

MAX_COUNT: Final = 2**31 - 1
"""Of characters, items or properties."""

UNWRITABLE: Final = re.compile(r"[\x00-\x07\x0B\x0E-\x1F\x7F]")
"""Characters that JSON text can only hold as `\\uXXXX`, which is not written here (see `lark`); llguidance would leave them out."""


def refusal_at(keyword: str, path: str, reason: str) -> Refusal:
    return Refusal(f"`{keyword}` at {path} {reason}")


def read_types(value: Any, path: str) -> Any:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise refusal_at("type", path, "must be a string or a list of strings, not empty")
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise refusal_at("type", path, f"names the unknown type {name!r}")
    return value if isinstance(value, str) else list(dict.fromkeys(names))


def read_number(value: Any, keyword: str, path: str) -> float:
    name = f"`{keyword}` at {path}" if keyword else path
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refusal(f"{name} must be a number")
    if not math.isfinite(value):
        raise Refusal(f"{name} must be finite")
    if abs(value) > MAX_EXACT_INTEGER:
        raise Refusal(f"{name} is beyond 2^53, where numbers cannot be told apart")
    if isinstance(value, float):
        _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
        assert isinstance(exponent, int), "the number is finite"
        if len(digits) > MAX_DIGITS or exponent < -MAX_EXPONENT:
            raise Refusal(f"{name} has too many digits, the limit is {MAX_DIGITS}: it cannot be enforced exactly")
    return value


def read_natural(value: Any, keyword: str, path: str) -> int:
    number = read_number(value, keyword, path)
    if number < 0 or number != int(number):
        raise refusal_at(keyword, path, "must be a whole number, 0 or more")
    if number > MAX_COUNT:
        raise refusal_at(keyword, path, f"is {int(number)}, the limit is {MAX_COUNT}")
    return int(number)


def read_pattern(value: Any, keyword: str, path: str) -> str:
    if not isinstance(value, str):
        raise refusal_at(keyword, path, "must be a string")
    try:
        return rust_pattern(value)
    except Refusal as refusal:
        raise refusal_at(keyword, path, f"{value[:80]!r}: {refusal.message}") from None


def pointer_step(name: str) -> str:
    """One step of a JSON pointer, kept short for messages."""
    return name[:60].replace("~", "~0").replace("/", "~1")


def kind_of(value: Any) -> str:
    return {type(None): "null", str: "a string", list: "a list", tuple: "a list"}.get(type(value), "a number")
