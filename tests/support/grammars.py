"""Which texts a compiled grammar takes, asked of llguidance with the tokenizer of the vetting."""

from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from services.grammar.vetting import Vetter
from shared.messages.constraints import Compile, Compiled, Constraint, ConstraintRefused
from shared.messages.packing import pack

Accepts = Callable[[str], bool]


def answer(vetter: Vetter, constraint: Constraint) -> Compiled | ConstraintRefused:
    return vetter.answer(pack(Compile(constraint=constraint)))


def refusal(vetter: Vetter, constraint: Constraint) -> str:
    """The message of the refusal that is expected."""
    reply = answer(vetter, constraint)
    assert isinstance(reply, ConstraintRefused), f"compiled instead of refused: {reply}"
    return reply.message


def language(vetter: Vetter, constraint: Constraint) -> Accepts:
    """Whether a whole text is in the language of a constraint that compiles."""
    reply = answer(vetter, constraint)
    assert isinstance(reply, Compiled), f"refused: {reply}"
    return language_of(vetter.tokenizer, reply.grammar)


def language_of(tokenizer: Any, grammar: str) -> Accepts:
    prototype = LLMatcher(tokenizer, grammar, log_level=0)
    assert not prototype.is_error(), prototype.get_error()

    def accepts(text: str) -> bool:
        matcher = prototype.deep_copy()
        tokens = tokenizer.tokenize_str(text, parse_special=True)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepts
