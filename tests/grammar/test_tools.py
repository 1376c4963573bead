"""Tool calls come out in the format of the model family, and only for tools that are offered."""

import pytest

from services.grammar.config import GrammarConfig
from services.grammar.vetting import Task, make_vetter
from shared.messages.constraints import ConstraintRefused, ToolCalls
from tests.support.grammars import answer, language

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
FREE = {
    "type": "function",
    "function": {"name": "free", "parameters": {"type": "object", "properties": {"a": {"const": 1}}}},
}

CALL_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALL_FREE = '<tool_call>\n{"name": "free", "arguments": {"a": 2}}\n</tool_call>'
BAD_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def calls(mode, *tools, **options):
    return ToolCalls(tools=tools or (ADD, NOW), mode=mode, **options)


@pytest.fixture
def vetter_for(model_path):
    def make(tool_format):
        return make_vetter(Task(model_path=str(model_path), tool_format=tool_format, limits=GrammarConfig().limits))

    return make


def test_required_means_one_call_or_several_and_nothing_else(vetter):
    accepts = language(vetter, calls("required"))
    assert accepts(CALL_ADD)
    assert accepts(CALL_NOW)
    assert accepts(CALL_ADD + "\n" + CALL_NOW)
    assert not accepts("")
    assert not accepts("text")
    assert not accepts(BAD_ADD)
    assert not accepts(CALL_ADD + " and text")


def test_without_parallel_calls_there_is_one(vetter):
    accepts = language(vetter, calls("required", parallel=False))
    assert accepts(CALL_ADD)
    assert not accepts(CALL_ADD + "\n" + CALL_NOW)


def test_a_named_function_is_called_once(vetter):
    accepts = language(vetter, calls("add"))
    assert accepts(CALL_ADD)
    assert not accepts(CALL_NOW)
    assert not accepts(CALL_ADD + "\n" + CALL_ADD)


def test_auto_leaves_text_free_and_enforces_strict_tools(vetter):
    accepts = language(vetter, calls("auto", ADD, FREE))
    for text in ("", "just text", "a < b", CALL_ADD, f"Let me see. {CALL_ADD}\n{CALL_FREE} Done."):
        assert accepts(text), text
    assert not accepts(BAD_ADD)
    assert not accepts('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')


def test_parameters_of_a_tool_that_is_not_strict_bind_when_a_call_is_required(vetter):
    accepts = language(vetter, calls("required", FREE))
    assert not accepts(CALL_FREE)
    assert accepts(CALL_FREE.replace("2", "1"))


def test_llama_3_writes_plain_json(vetter_for):
    vetter = vetter_for("llama3")
    accepts = language(vetter, calls("required"))
    call = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    assert accepts(call)
    assert accepts(call + "; " + call)
    auto = language(vetter, calls("auto"))
    assert auto("text")
    assert auto("")
    assert auto(call)
    assert not auto('{"name": "add"}')


def test_mistral_writes_a_list_behind_its_control_token(vetter_for):
    vetter = vetter_for("mistral")
    call = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    accepts = language(vetter, calls("required"))
    assert accepts(f"[TOOL_CALLS][{call}]")
    assert accepts(f"[TOOL_CALLS][{call}, {call}]")
    assert not accepts(call)
    auto = language(vetter, calls("auto"))
    assert auto("text")
    assert auto(f"text[TOOL_CALLS][{call}]")
    assert not auto("[TOOL_CALLS][]")


def test_compact_calls(vetter):
    accepts = language(vetter, calls("add", whitespace="compact"))
    assert accepts('<tool_call>\n{"name":"add","arguments":{"a":1,"b":2}}\n</tool_call>')


@pytest.mark.parametrize(
    ("constraint", "param", "named"),
    [
        (ToolCalls(tools=(), mode="required"), "tools", "no tools"),
        (calls("nope"), "tool_choice", "'nope'"),
        (calls("required", ADD, ADD), "tools", "twice"),
        (calls("required", {"type": "function"}), "tools", "tools[0]"),
        (
            calls("add", {"function": {"name": "add", "parameters": {"type": 123}}}),
            "tools",
            "tools[0].function.parameters",
        ),
        (calls("add", {"function": {"name": "add", "parameters": {"type": "string"}}}), "tools", "object"),
        (
            calls("required", NOW, {"function": {"name": "x", "parameters": {"$ref": "#/$defs/nope"}}}),
            "tools",
            "tools[1].function.parameters",
        ),
    ],
)
def test_tools_that_make_no_sense_are_refused_with_their_place(vetter, constraint, param, named):
    reply = answer(vetter, constraint)
    assert isinstance(reply, ConstraintRefused)
    assert reply.param == param
    assert named in reply.message


def test_the_asker_may_name_the_format_that_its_parser_reads(vetter):
    accepts = language(vetter, calls("add", tool_format="llama3"))
    assert accepts('{"name": "add", "parameters": {"a": 1, "b": 2}}')
    assert isinstance(answer(vetter, calls("add", tool_format="xml")), ConstraintRefused)
