"""Context-free grammars of clients: GBNF (llama.cpp) and Lark, told apart by their text."""

import re
from typing import Final

from llguidance.gbnf_to_lark import gbnf_to_lark

from services.grammar.refusal import Refusal

_GBNF_RULE: Final = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_UNICODE_ESCAPE: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
_HIDDEN_OPTION: Final = re.compile(r"^\s*[?!]*[\w-]+\s*\[[^\]\n]*?\b(temperature|max_tokens|stop)\b", re.MULTILINE)


def to_lark(text: str) -> str:
    """The grammar in llguidance's Lark dialect. Raises Refusal; what it lets pass may still fail to compile."""
    if _GBNF_RULE.search(text):
        return _from_gbnf(text)
    if found := _HIDDEN_OPTION.search(text):
        raise Refusal(f"the rule option `{found[1]}` is not supported")
    return text


def _from_gbnf(text: str) -> str:
    try:
        lark: str = gbnf_to_lark(_UNICODE_ESCAPE.sub(_character, text))
    except RecursionError:
        raise Refusal("the GBNF grammar is nested too deeply") from None
    except Exception as error:  # the converter raises bare Exception for what it does not know
        raise Refusal(f"the GBNF grammar cannot be read: {_first_line(str(error))}") from None
    return lark


def _character(match: re.Match[str]) -> str:
    """The character itself instead of its escape, which the converter would spoil; ASCII stays escaped, as `\\xHH`."""
    code = int(match[2] or match[3], 16)
    if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
        raise Refusal(f"the escape `{match.group()}` is no character")
    return match[1] + (f"\\x{code:02X}" if code < 0x80 else chr(code))


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:300]
