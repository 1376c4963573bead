"""Models that think before they answer: the thinking is free text, the answer behind it follows the grammar."""

import json
from collections.abc import Mapping
from typing import Any, Final

from services.grammar.lark import LarkGrammar, sequence
from shared.messages.constraints import Thinking

ANSWER: Final = "answer"
SPACE_BEHIND_THINKING: Final = r"/[ \t\r\n]{1,4}/"
"""Between thinking and answer, as models were trained to write it; it belongs to neither."""


def behind_thinking(grammar: str, thinking: Thinking, special_tokens: Mapping[str, int]) -> str:
    """`grammar` for what stands behind the end tag. Text cannot end inside the thinking. Raises Refusal."""
    lark = LarkGrammar(special_tokens)
    space = lark.rule(SPACE_BEHIND_THINKING)
    thought = sequence(lark.text_until(thinking.end), f"{space}?")
    if not thinking.opened:
        thought = f"({sequence(lark.marker(thinking.start), thought)})?"
    return json.dumps(
        {"grammars": [{"lark_grammar": lark.finish(f"{thought} @{ANSWER}")}, {**_single(grammar), "name": ANSWER}]},
        ensure_ascii=False,
    )


def _single(grammar: str) -> dict[str, Any]:
    """As a member of a list of grammars, which can refer to each other by name: what is no such list is Lark."""
    if not grammar.startswith("{"):
        return {"lark_grammar": grammar}
    (member,) = json.loads(grammar)["grammars"]
    assert isinstance(member, dict), type(member)
    return member
