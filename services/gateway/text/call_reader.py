"""One tool call written as a JSON object: finds its name and passes its arguments on while they are written."""

import json
import re
from enum import Enum, auto

from services.gateway.text.json_scanner import WHITESPACE, Expect, JsonScanner


class Verdict(Enum):
    MORE = auto()
    DONE = auto()
    BAD = auto()
    """With this character it is no tool call."""


class _Role(Enum):
    """What a character belongs to, outside of punctuation."""

    KEY = auto()
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()


_ROLE_OF_KEY = {
    "name": _Role.NAME,
    "arguments": _Role.ARGUMENTS,
    "parameters": _Role.ARGUMENTS,
    "id": _Role.OTHER,
    "type": _Role.OTHER,
}
_FIRST_OF_ROLE = {_Role.NAME: '"', _Role.ARGUMENTS: "{"}
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_MEMBER_BEGINS = (Expect.KEY, Expect.KEY_OR_END)
_PART_ENDED = (Expect.COLON, Expect.COMMA_OR_END, Expect.KEY)


class CallReader:
    """Reads `{"name": "…", "arguments": {…}}` (or `parameters`), members in any order; `id` and `type` are skipped.

    Any other key says at once that this is no call: an answer in JSON is not held back to its end.

    name           the tool's name, once it has been read
    has_arguments  the arguments have begun
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self._scanner = JsonScanner()
        self._role: _Role | None = None
        self._next_role = _Role.OTHER
        """Of the value whose key has been read."""
        self._part = ""
        """The key or name being read, as JSON."""
        self._arguments = ""
        """Read and not yet taken."""

    def take_arguments(self) -> str:
        """The arguments read since the last call, as the model writes them; control characters in strings are escaped."""
        taken, self._arguments = self._arguments, ""
        return taken

    def num_plain(self, text: str, position: int) -> int:
        """How many characters from `position` on are inside of a string of the arguments, with nothing special about them."""
        if self._role is not _Role.ARGUMENTS or self._scanner.expect is not Expect.STRING:
            return 0
        plain = _PLAIN.match(text, position)
        return 0 if plain is None else plain.end() - position

    def feed(self, character: str) -> Verdict:
        scanner = self._scanner
        expected, depth, in_string = scanner.expect, scanner.depth, scanner.in_string
        if not scanner.feed(character):
            return Verdict.BAD
        if scanner.expect is Expect.NOTHING:
            return Verdict.DONE
        if depth == 1 and character not in WHITESPACE and not self._begin(expected, character):
            return Verdict.BAD
        if self._role is _Role.ARGUMENTS:
            self._arguments += json.dumps(character)[1:-1] if in_string and character < " " else character
        elif self._role in (_Role.KEY, _Role.NAME):
            self._part += character
        if scanner.depth == 1 and scanner.expect in _PART_ENDED and self._role is not None:
            return self._end()
        return Verdict.MORE

    def _begin(self, expected: Expect, character: str) -> bool:
        """See whether a key or a value of the call itself begins here; False if it is none that a call can have."""
        if expected in _MEMBER_BEGINS and character == '"':
            self._role = _Role.KEY
        elif expected is Expect.VALUE:
            self._role = self._next_role
            if character != _FIRST_OF_ROLE.get(self._role, character):
                return False
            if self._role is _Role.ARGUMENTS:
                if self.has_arguments:
                    return False
                self.has_arguments = True
        return True

    def _end(self) -> Verdict:
        ended, self._role = self._role, None
        part, self._part = self._part, ""
        if ended is _Role.KEY:
            role = _ROLE_OF_KEY.get(json.loads(part, strict=False))
            if role is None:
                return Verdict.BAD
            self._next_role = role
        elif ended is _Role.NAME:
            name = json.loads(part, strict=False)
            if self.name is not None or not name or not name.isprintable():  # a lone surrogate is not printable either
                return Verdict.BAD
            self.name = name
        return Verdict.MORE
