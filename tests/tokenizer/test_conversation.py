import json

import pytest

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.conversation import prepare
from services.tokenizer.placeholders import Placeholders
from services.tokenizer.template_traits import TemplateTraits, traits_of
from tests.support import chat_templates

NONCE = "31415926535897932384"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ALL = TemplateTraits(system=True, tools=True, tool_calls=True, text_arguments=False, short_call_ids=False)
NONE = TemplateTraits(system=False, tools=False, tool_calls=False, text_arguments=False, short_call_ids=False)


def called(arguments):
    function = {"name": "add"} if arguments is ... else {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def rendered(source, messages, tools=()):
    """As the core renders, without control tokens."""
    template, placeholders = ChatTemplate(source), Placeholders(NONCE)
    prepared, tools = prepare(messages, tools, traits_of(template), placeholders)
    return placeholders.restore(template.render(prepared, tools, add_generation_prompt=False))


@pytest.mark.parametrize(
    ("source", "traits"),
    [
        (
            chat_templates.CHATML,
            TemplateTraits(system=True, tools=False, tool_calls=False, text_arguments=False, short_call_ids=False),
        ),
        (chat_templates.WITH_TOOLS, ALL),
        (chat_templates.STRICT, NONE),
        (
            chat_templates.SHORT_IDS,
            TemplateTraits(system=True, tools=False, tool_calls=True, text_arguments=False, short_call_ids=True),
        ),
        (
            chat_templates.TEXT_ARGUMENTS,
            TemplateTraits(system=True, tools=False, tool_calls=True, text_arguments=True, short_call_ids=False),
        ),
    ],
)
def test_a_template_shows_what_it_can_do(source, traits):
    assert traits_of(ChatTemplate(source)) == traits


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1, "b": "ü"}', '{"a": 1, "b": "ü"}'),
        ({"a": 1}, '{"a": 1}'),
        ('{"a": 1, "b":', '{"a": 1, "b":'),
        ("", "{}"),
        (" ", "{}"),
        (..., "{}"),
        (None, "{}"),
        ("null", "null"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
        ('"text"', '"text"'),
    ],
)
@pytest.mark.parametrize("source", [chat_templates.WITH_TOOLS, chat_templates.CHATML])
def test_arguments_of_the_history_are_rendered_once_whatever_they_are(source, arguments, shown):
    text = rendered(source, [{"role": "user", "content": "q"}, called(arguments)])
    assert f'"arguments": {shown}' in text
    assert '\\"' not in text


def test_a_template_that_wants_text_gets_the_arguments_as_text():
    for arguments in ({"a": 1}, '{"a": 1}', '{"a":'):
        shown = arguments if arguments == '{"a":' else '{"a": 1}'
        assert f"CALL add {shown}\n" in rendered(chat_templates.TEXT_ARGUMENTS, [called(arguments)])


def test_ids_are_renumbered_for_a_template_that_takes_only_short_ones():
    second = called('{"a": ')
    second["tool_calls"][0]["id"] = "call_2"
    results = [{"role": "tool", "tool_call_id": call_id, "content": call_id} for call_id in ("call_2", "c1")]
    assert rendered(chat_templates.SHORT_IDS, [called({"a": 1}), second, *results]) == (
        '000000000:{"name": "add", "arguments": {"a": 1}}\n\n000000001:{"name": "add", "arguments": {"a": }\n\n'
        "000000001=call_2\n000000000=c1\n"
    )


def test_tools_go_to_a_template_that_renders_them():
    messages = [{"role": "user", "content": "q"}]
    assert prepare(messages, [TOOL], ALL, Placeholders(NONCE)) == (messages, [TOOL])


@pytest.mark.parametrize(
    "traits",
    [NONE, TemplateTraits(system=True, tools=False, tool_calls=False, text_arguments=False, short_call_ids=False)],
)
def test_tools_are_described_where_the_template_has_no_place_for_them(traits):
    prepared, tools = prepare([{"role": "user", "content": "q"}], [TOOL], traits, Placeholders(NONCE))
    assert tools == []
    assert [message["role"] for message in prepared] == (["system", "user"] if traits.system else ["user"])
    assert json.dumps(TOOL) in prepared[0]["content"] and "<tool_call>" in prepared[0]["content"]
    assert prepared[-1]["content"].endswith("q")


def test_a_system_text_of_the_client_comes_before_the_tools():
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "q"}]
    prepared, _ = prepare(messages, [TOOL], NONE, Placeholders(NONCE))
    assert len(prepared) == 2
    assert prepared[0]["role"] == "system"
    assert prepared[0]["content"].startswith("Be brief.\n\n")


def test_calls_and_results_are_written_out_where_the_template_drops_them():
    messages = [
        {"role": "user", "content": "q"},
        called('{"a": 1}') | {"content": "Let me see."},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]
    assert rendered(chat_templates.CHATML, messages) == (
        "<|im_start|>user\nq<|im_end|>\n"
        '<|im_start|>assistant\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    )


def test_nulls_are_not_there_and_content_always_is():
    (message,), _ = prepare([{"role": "assistant", "content": None, "name": None}], (), ALL, Placeholders(NONCE))
    assert message == {"role": "assistant", "content": ""}
