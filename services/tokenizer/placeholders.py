"""Stand-ins for client text that a chat template must pass on without looking into it.

A placeholder is a number that no client can guess: trimming, changing case, splitting and JSON leave it alone. After the
rendering, when the control tokens that the template wrote are marked, each placeholder becomes its text again.
"""

import re
from collections.abc import Collection
from typing import Any

_INDEX_DIGITS = 9


class Placeholders:
    """The placeholders of one rendering."""

    def __init__(self, nonce: str) -> None:
        assert nonce.isdigit(), "only digits survive every filter of a template"
        self._nonce = nonce
        self._texts: list[str] = []
        self._known: dict[tuple[str, bool], str] = {}
        self._unquoted: set[int] = set()
        self._pattern = re.compile(rf'("?){nonce}(\d{{{_INDEX_DIGITS}}})("?)')

    def hold(self, text: str, *, unquoted: bool = False) -> str:
        """A placeholder for `text`; if `unquoted`, the quotes that a template's `tojson` puts around it vanish again."""
        if (placeholder := self._known.get((text, unquoted))) is None:
            index = len(self._texts)
            self._texts.append(text)
            if unquoted:
                self._unquoted.add(index)
            placeholder = self._known[text, unquoted] = f"{self._nonce}{index:0{_INDEX_DIGITS}d}"
        return placeholder

    def restore(self, rendered: str) -> str:
        """`rendered` with the texts in place of their placeholders."""
        return self._pattern.sub(self._text_of, rendered) if self._texts else rendered

    def _text_of(self, match: re.Match[str]) -> str:
        before, after = match[1], match[3]
        index = int(match[2])
        if index in self._unquoted and before and after:
            return self._texts[index]
        return before + self._texts[index] + after


class ControlTexts:
    """Finds the spellings of control tokens in client text and hides them from the template.

    A beginning of a spelling at the end of a string is hidden too: what the template puts behind it might complete it.
    """

    def __init__(self, spellings: Collection[str]) -> None:
        longest_first = sorted(spellings, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {text[:length] for text in spellings for length in range(1, len(text))}
        self._max_beginning = max(map(len, self._beginnings), default=0)

    def hide(self, value: Any, placeholders: Placeholders) -> Any:
        """`value` (JSON data) with placeholders in all its strings, keys included. Raises RecursionError if nested too deeply."""
        match value:
            case str():
                return self._hide_text(value, placeholders)
            case dict():
                return {
                    self._hide_text(key, placeholders): self.hide(item, placeholders) for key, item in value.items()
                }
            case list() | tuple():
                return [self.hide(item, placeholders) for item in value]
        return value

    def _hide_text(self, text: str, placeholders: Placeholders) -> str:
        hidden = self._pattern.sub(lambda match: placeholders.hold(match[0]), text)
        trimmed = hidden.rstrip()
        for length in range(min(len(trimmed), self._max_beginning), 0, -1):
            beginning = trimmed[-length:]
            if beginning in self._beginnings:
                return trimmed[:-length] + placeholders.hold(beginning) + hidden[len(trimmed) :]
        return hidden
