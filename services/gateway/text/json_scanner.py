"""JSON read a character at a time: says at once when a text can no longer become a JSON object."""

from enum import Enum, auto

WHITESPACE = " \t\n\r"
_DIGITS = "0123456789"
_HEX_DIGITS = _DIGITS + "abcdefABCDEF"
_ESCAPES = '"\\/bfnrt'
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class Expect(Enum):
    """What the next character may be."""

    OBJECT = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()
    NOTHING = auto()


class JsonScanner:
    """Follows one JSON object (RFC 8259, except that strings may hold raw control characters, as models write them).

    expect  what may come next; NOTHING after the object's last brace
    depth   containers open: 1 between the members of the object itself
    """

    def __init__(self) -> None:
        self.expect = Expect.OBJECT
        self._closers: list[str] = []
        self._is_key = False
        self._rest = ""
        """LITERAL: the characters that must follow; HEX: one character for each digit that must."""
        self._number = ""
        """The place in a number: one of the keys of `_NUMBER`."""

    @property
    def depth(self) -> int:
        return len(self._closers)

    @property
    def in_string(self) -> bool:
        return self.expect in (Expect.STRING, Expect.ESCAPE, Expect.HEX)

    def feed(self, character: str) -> bool:
        """Take the next character; False when no JSON object begins with what was fed. Then feed no more."""
        match self.expect:
            case Expect.STRING:
                return self._feed_string(character)
            case Expect.ESCAPE:
                return self._feed_escape(character)
            case Expect.HEX:
                self._rest = self._rest[1:]
                self.expect = Expect.HEX if self._rest else Expect.STRING
                return character in _HEX_DIGITS
            case Expect.LITERAL:
                expected, self._rest = self._rest[0], self._rest[1:]
                self.expect = Expect.LITERAL if self._rest else Expect.COMMA_OR_END
                return character == expected
            case Expect.NUMBER:
                return self._feed_number(character)
        return character in WHITESPACE or self._feed_structure(character)

    def _feed_structure(self, character: str) -> bool:
        match self.expect, character:
            case Expect.OBJECT, "{":
                self._open("}", Expect.KEY_OR_END)
            case ((Expect.KEY | Expect.KEY_OR_END), '"'):
                self._is_key = True
                self.expect = Expect.STRING
            case Expect.COLON, ":":
                self.expect = Expect.VALUE
            case ((Expect.VALUE | Expect.VALUE_OR_END), _) if self._begin_value(character):
                pass
            case Expect.COMMA_OR_END, ",":
                self.expect = Expect.KEY if self._closers[-1] == "}" else Expect.VALUE
            case ((Expect.COMMA_OR_END | Expect.KEY_OR_END | Expect.VALUE_OR_END), _) if character == self._closers[-1]:
                self._closers.pop()
                self.expect = Expect.COMMA_OR_END if self._closers else Expect.NOTHING
            case _:
                return False
        return True

    def _begin_value(self, character: str) -> bool:
        if character == '"':
            self._is_key = False
            self.expect = Expect.STRING
        elif character == "{":
            self._open("}", Expect.KEY_OR_END)
        elif character == "[":
            self._open("]", Expect.VALUE_OR_END)
        elif character in _LITERALS:
            self._rest = _LITERALS[character][1:]
            self.expect = Expect.LITERAL
        elif place := _NUMBER["start"].get(character):
            self._number = place
            self.expect = Expect.NUMBER
        else:
            return False
        return True

    def _open(self, closer: str, expect: Expect) -> None:
        self._closers.append(closer)
        self.expect = expect

    def _feed_string(self, character: str) -> bool:
        if character == "\\":
            self.expect = Expect.ESCAPE
        elif character == '"':
            self.expect = Expect.COLON if self._is_key else Expect.COMMA_OR_END
        return True

    def _feed_escape(self, character: str) -> bool:
        if character == "u":
            self.expect, self._rest = Expect.HEX, "0000"
            return True
        self.expect = Expect.STRING
        return character in _ESCAPES

    def _feed_number(self, character: str) -> bool:
        if place := _NUMBER[self._number].get(character):
            self._number = place
            return True
        if self._number not in _NUMBER_ENDS:
            return False
        self.expect = Expect.COMMA_OR_END
        return character in WHITESPACE or self._feed_structure(character)


_NUMBER = {
    "start": {"-": "minus", "0": "zero"} | dict.fromkeys("123456789", "whole"),
    "minus": {"0": "zero"} | dict.fromkeys("123456789", "whole"),
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "whole": {".": "point", "e": "exponent", "E": "exponent"} | dict.fromkeys(_DIGITS, "whole"),
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "exponent", "E": "exponent"} | dict.fromkeys(_DIGITS, "fraction"),
    "exponent": {"+": "sign", "-": "sign"} | dict.fromkeys(_DIGITS, "power"),
    "sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
"""Place in a number -> character -> next place."""
_NUMBER_ENDS = {"zero", "whole", "fraction", "power"}
