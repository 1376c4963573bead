"""Grammars whose texts have more and more readings are refused before they slow down a worker; useful ones are not."""

import pytest

from services.grammar.config import GrammarConfig
from services.grammar.vetting import Task, Vetter, make_vetter
from shared.messages.constraints import Compile, Compiled, ConstraintRefused, Ebnf
from shared.messages.packing import pack
from tests.support.default_model import default_model_folder


@pytest.fixture(scope="module")
def vetter() -> Vetter:
    """With a real vocabulary: what a mask costs depends on it."""
    return make_vetter(
        Task(model_path=str(default_model_folder()), tool_format="hermes", limits=GrammarConfig().limits)
    )


def answer(vetter: Vetter, grammar: str) -> Compiled | ConstraintRefused:
    return vetter.answer(pack(Compile(constraint=Ebnf(grammar=grammar))))


@pytest.mark.parametrize(
    "grammar",
    [
        'start: s\ns: s s | s s s | "a" | ""',
        "start: s\ns: s s | t\nt: t t | /[a-z ]/",
        'root ::= s\ns ::= s s | "(" s ")" | [ab] | ""',
    ],
)
def test_a_text_with_ever_more_readings_is_refused(vetter: Vetter, grammar: str) -> None:
    refused = answer(vetter, grammar)
    assert isinstance(refused, ConstraintRefused)
    assert "too ambiguous" in refused.message


@pytest.mark.parametrize(
    "grammar",
    [
        'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[a-z]/',
        'start: p\np: "a" p "a" | "b" p "b" | "a" | "b" | ""',
        "root ::= [a-z ]+",
        'root ::= (expr "=" term "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= [a-z]+ | [0-9]+ | "(" expr ")"',
        'root ::= sentence+\nsentence ::= word (" " word)* [.!?] " "?\nword ::= [A-Za-z]+',
        'start: c\nc: c " AND " c | c " OR " c | NAME "=" VALUE | "(" c ")"\nNAME: /[a-z_]+/\nVALUE: /[0-9]+/',
    ],
)
def test_recursion_repetition_and_operators_without_precedence_are_not(vetter: Vetter, grammar: str) -> None:
    assert isinstance(answer(vetter, grammar), Compiled)
