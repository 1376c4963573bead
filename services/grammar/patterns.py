r"""Regular expressions of JSON Schema (ECMA-262) in the syntax of the Rust regex engine, meaning the same.

The two agree on most of their syntax. Where they read the same text differently (`[[a]`, `[a&&b]`, `.`, `\s`, `\cA`, `\uXXXX`,
`[]`) it is rewritten; what a finite automaton cannot do (look-around, back-references, word boundaries) is refused.

Validators disagree on `\d`, `\w` and `\s` outside ASCII: ECMA-262 has the first two ASCII, Python's `re` has all of them Unicode.
What is generated should satisfy both, so each stands for the characters on which both agree.
"""

import re
from typing import Final

from services.grammar.refusal import Refusal

_SPACE: Final = r" \t\n\x0B\x0C\r\u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}"
_CERTAIN: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
"""Characters of a class on which all agree."""
_POSSIBLE: Final = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": _SPACE + r"\x1C-\x1F\u{85}\u{FEFF}"}
"""Those that some count in."""
_NOT_NEWLINE: Final = r"[^\n\r\u{2028}\u{2029}]"
_LOOK_AROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")
_GROUP: Final = re.compile(r"\(\?(?:P?<[A-Za-z_]\w*>|[is]*(?:-[is]+)?[:)])")
_META: Final = frozenset(r"\.+*?()|[]{}^$#&-~")
_SAME_ESCAPES: Final = frozenset("ntrfv")


def rust_pattern(pattern: str) -> str:
    """The same language for the Rust engine. Raises Refusal naming what cannot be enforced; other mistakes are left to it."""
    return _Translator(pattern).translate()


class _Translator:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def translate(self) -> str:
        out: list[str] = []
        dot_matches_all = False
        while self.at < len(self.pattern):
            char = self.pattern[self.at]
            if char == "\\":
                out.append(self._escape())
            elif char == "[":
                out.append(self._class())
            elif char == "." and not dot_matches_all:
                self.at += 1
                out.append(_NOT_NEWLINE)
            elif self.pattern.startswith("(?", self.at):
                group = self._group()
                # From a flag s on, the rest of the pattern is read as the engine reads it.
                dot_matches_all = dot_matches_all or "s" in group.partition("<")[0].partition("-")[0]
                out.append(group)
            else:
                self.at += 1
                out.append(char)
        return "".join(out)

    def _group(self) -> str:
        for look in _LOOK_AROUND:
            if self.pattern.startswith(look, self.at):
                raise Refusal(f"look-around `{look}...)` cannot be enforced")
        found = _GROUP.match(self.pattern, self.at)
        if found is None:
            raise Refusal(f"the group `{self.pattern[self.at : self.at + 4]}` is not supported")
        self.at = found.end()
        return found.group()

    def _class(self) -> str:
        start = self.at
        self.at += 1
        negated = self.pattern.startswith("^", self.at)
        self.at += negated
        items: list[str] = []
        while not self.pattern.startswith("]", self.at):
            if self.at >= len(self.pattern):
                raise Refusal(f"the character class `{self.pattern[start : start + 20]}` is not closed")
            char = self.pattern[self.at]
            if char == "\\":
                items.append(self._escape(in_class=True, in_negated=negated))
                continue
            self.at += 1
            # Set operations of the Rust engine; in ECMA-262 these are plain characters.
            items.append("\\" + char if char in "[&~" else char)
        self.at += 1
        if not items:
            return r"(?s:.)" if negated else r"[^\s\S]"
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def _escape(self, *, in_class: bool = False, in_negated: bool = False) -> str:
        """One escape sequence; `at` stands on the backslash."""
        rest = self.pattern[self.at + 1 :][:12]
        if not rest:
            raise Refusal("the pattern ends in a backslash")
        char = rest[0]
        self.at += 2
        if char in _SAME_ESCAPES:
            return "\\" + char
        if (kind := char.lower()) in _CERTAIN:
            # What is excluded from a class must be every character that may count in, and so for a complement.
            members = (_POSSIBLE if in_negated != (char != kind) else _CERTAIN)[kind]
            if char != kind:
                return f"[^{members}]"
            return members if in_class else f"[{members}]"
        if char == "b" and in_class:
            return r"\x08"
        if char in "bB":
            raise Refusal(f"the word boundary `\\{char}` cannot be enforced")
        if char in "123456789k":
            raise Refusal(f"the back-reference `\\{char}` cannot be enforced")
        if char in "pP":
            return "\\" + char
        if char == "0":
            return r"\x00"
        if char in "xuc":
            return self._character(char, rest)
        if char.isascii() and char.isalnum():
            raise Refusal(f"the escape `\\{char}` is unknown")
        return "\\" + char if char in _META else char

    def _character(self, kind: str, rest: str) -> str:
        if kind == "c" and (found := re.match(r"c([A-Za-z])", rest)):
            code = ord(found[1]) % 32
        elif kind == "x" and (found := re.match(r"x([0-9A-Fa-f]{2})", rest)):
            code = int(found[1], 16)
        elif found := re.match(r"u([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})", rest):
            code = 0x10000 + ((int(found[1], 16) - 0xD800) << 10) + int(found[2], 16) - 0xDC00
        elif found := re.match(r"u(?:\{([0-9A-Fa-f]{1,6})\}|([0-9A-Fa-f]{4}))", rest):
            code = int(found[1] or found[2], 16)
        else:
            raise Refusal(f"the escape `\\{rest[:4]}` is not complete")
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            raise Refusal(f"the escape `\\{found.group()}` is no character")
        self.at += len(found.group()) - 1
        return f"\\u{{{code:X}}}"
