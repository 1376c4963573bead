"""Pieces of llguidance's Lark dialect, and how JSON is spaced in them."""

import json
from collections.abc import Mapping
from typing import Any, Final

from llguidance import regex_to_lark

from services.grammar.refusal import Refusal

MAX_FLEXIBLE_WHITESPACE: Final = 20
"""Longest run of whitespace between two JSON tokens when spacing is "flexible": an unbounded run is a way to never end."""

_STRING_ESCAPES: Final = 'nrbtf\\"'
"""No `\\uXXXX`: an escaped property name would pass as an additional one, and escaped text counts wrongly against maxLength."""

JSON_STYLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
    "compact": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "flexible": {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_FLEXIBLE_WHITESPACE}}}",
    },
}


def json_options(whitespace: str) -> dict[str, Any]:
    """llguidance's options for a style. "default" writes as `json.dumps(..., ensure_ascii=False)` does. Raises Refusal."""
    style = JSON_STYLES.get(whitespace)
    if style is None:
        raise Refusal(f"JSON whitespace {whitespace!r} is none of {', '.join(JSON_STYLES)}")
    return {**style, "json_allowed_escapes": _STRING_ESCAPES}


def literal(text: str) -> str:
    """A string literal; "" where there is nothing to write."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def json_value(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """A JSON value that fits a normalised schema."""
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regular expression between slashes."""
    escaped: str = regex_to_lark(pattern, "")
    return f"/{escaped}/"


def sequence(*items: str) -> str:
    """One after the other; what is empty is left out."""
    return " ".join(item for item in items if item) or '""'


class LarkGrammar:
    """Rules in the order they were added; `start` comes last."""

    HEADER: Final = "%llguidance {}"
    TEXT: Final = "TEXT"
    """A terminal for free text, special tokens excluded."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._lines = [self.HEADER, f"{self.TEXT}: /(?s:.*)/"]
        self._num_rules = 0

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule; returns its name. A lazy rule ends at the first place where it can: for text up to a marker."""
        name = f"rule_{self._num_rules}"
        self._num_rules += 1
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def marker(self, text: str) -> str:
        """Fixed text in which the model's special tokens are written as tokens: the model never spells them out."""
        items: list[str] = []
        while text:
            at, token = self._next_special(text)
            items.append(literal(text[:at]))
            if token:
                items.append(f"<[{self._special_tokens[token]}]>")
            text = text[at + len(token) :]
        return " ".join(item for item in items if item)

    def text_until(self, marker: str) -> str:
        """A rule for free text that ends with the first `marker`."""
        at, token = self._next_special(marker)
        if token and at == 0:
            return self.rule(f"{self.TEXT} {self.marker(marker)}")
        if token:
            raise Refusal(f"the marker {marker!r} has the special token {token!r} inside; it may only begin with one")
        return self.rule(f"{self.TEXT} {literal(marker)}", lazy=True)

    def finish(self, start: str) -> str:
        return "\n".join([*self._lines, f"start: {start}", ""])

    def _next_special(self, text: str) -> tuple[int, str]:
        """Where the first special token of `text` stands, and which; its end and "" when there is none."""
        found = [(at, -len(token), token) for token in self._special_tokens if (at := text.find(token)) >= 0]
        if not found:
            return len(text), ""
        at, _, token = min(found)
        return at, token
