"""Reasoning models: a grammar binds the answer, not the thinking before it."""

import pytest

from shared.messages.constraints import (
    Choice,
    Compile,
    Compiled,
    Constraint,
    ConstraintRefused,
    Ebnf,
    JsonSchema,
    Regex,
    StructuralTag,
    Thinking,
    ToolCalls,
)
from shared.messages.packing import pack
from tests.support.grammars import language_of

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = ({"type": "function", "function": {"name": "f"}},)
ANSWERS: list[tuple[Constraint, str]] = [
    (JsonSchema(schema=OBJECT), '{"a": 12}'),
    (Regex(pattern=r"\d{3}"), "123"),
    (Choice(options=("yes", "no")), "no"),
    (Ebnf(grammar='root ::= "a" root | "b"'), "aab"),
    (Ebnf(grammar='start: thinking /[0-9]/\nthinking: "t"'), "t1"),
    (
        StructuralTag(spec={"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}),
        "<a>b</a>",
    ),
    (ToolCalls(tools=TOOLS, mode="required"), '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
]
by_constraint = pytest.mark.parametrize(
    ("constraint", "answer"), ANSWERS, ids=[f"{type(c).__name__}-{a[:3]}" for c, a in ANSWERS]
)


def thinks(*, opened: bool, start: str = "<think>", end: str = "</think>") -> Thinking:
    return Thinking(start=start, end=end, opened=opened)


def accepts_of(vetter, constraint, thinking):
    reply = vetter.answer(pack(Compile(constraint=constraint, thinking=thinking)))
    assert isinstance(reply, Compiled), reply
    return language_of(vetter.tokenizer, reply.grammar)


@by_constraint
def test_the_grammar_begins_behind_the_thinking_that_the_prompt_opened(vetter, constraint, answer):
    accepts = accepts_of(vetter, constraint, thinks(opened=True))
    assert accepts(f"I {{could}} say\nit</think>\n\n{answer}")
    assert accepts(f"</think>{answer}")
    assert not accepts(answer)
    assert not accepts("I think</think>")
    assert not accepts(f"I think</think>x{answer}")
    assert not accepts(f"I think</think>and think</think>{answer}")


@by_constraint
def test_a_model_may_think_or_answer_at_once(vetter, constraint, answer):
    accepts = accepts_of(vetter, constraint, thinks(opened=False))
    assert accepts(answer)
    assert accepts(f"<think>\nI could say it\n</think>\n\n{answer}")
    assert not accepts(f"I think</think>{answer}")
    assert not accepts("<think>I think")
    assert not accepts(f"{answer}<think></think>")


def test_tags_that_are_control_tokens_are_written_as_tokens(vetter):
    tags = thinks(opened=False, start="[TOOL_CALLS]", end="<|python_tag|>")
    accepts = accepts_of(vetter, Choice(options=("yes",)), tags)
    assert accepts("[TOOL_CALLS]well<|python_tag|>yes")
    assert not accepts("[TOOL_CALLS]well<|im_end|><|python_tag|>yes")


def test_what_cannot_be_enforced_is_refused_behind_thinking_too(vetter):
    reply = vetter.answer(pack(Compile(constraint=Regex(pattern="(?=a)"), thinking=thinks(opened=True))))
    assert isinstance(reply, ConstraintRefused)
    assert "look-around" in reply.message
