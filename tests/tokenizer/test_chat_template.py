"""Templates render as transformers renders them."""

import json
from datetime import datetime

import jinja2
import pytest

from services.tokenizer.chat_template import ChatTemplate, TemplateRefusal
from tests.support import chat_templates

chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")

USER = {"role": "user", "content": " Hi <b>&\"'é\n"}
CHAT = [
    {"role": "system", "content": "Be kind."},
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "ü<"}}}],
    },
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SNIPPETS = [
    "{% for m in messages %}\n    {% if loop.first %}\n  first\n    {% endif %}\n{{ m.role }}\n{% endfor %}\n",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools | tojson(ensure_ascii=True, separators=(',', ':')) }}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% generation %}{{ messages[1].content | trim | upper }}{% endgeneration %}|{{ bos_token }}|{{ eos_token }}",
    "{% macro show(m) %}{{ m.content | e }}{% endmacro %}{{ show(messages[1]) }}{{ messages[1]['content'].split('H')[-1] }}",
    "{{ tools is none }}{{ documents is none }}{{ missing is defined }}{{ enable_thinking }}{{ add_generation_prompt }}",
]


@pytest.mark.parametrize(
    "source", [*SNIPPETS, chat_templates.WITH_TOOLS, chat_templates.TEXT_ARGUMENTS.replace("arguments'] ", "name'] ")]
)
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_template_renders_as_in_transformers(source, tools):
    extra = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = chat_template_utils.render_jinja_template(
        [CHAT], tools=tools or None, chat_template=source, add_generation_prompt=True, enable_thinking=False, **extra
    )
    template = ChatTemplate(source, special_tokens=extra)
    assert template.render(CHAT, tools, template_args={"enable_thinking": False}) == expected


def test_the_date_comes_from_the_clock():
    rendered = ChatTemplate("{{ strftime_now('%Y') }}").render([USER])
    assert abs(int(rendered) - datetime.now().year) <= 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (chat_templates.STRICT, "Conversation roles must alternate user/assistant/user/assistant/..."),
        ("{{ messages[0].content + none }}", "TypeError"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[0].content.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ range(999999999) }}", "OverflowError"),
        ("{{ messages[0].content | int / 'x' }}", "TypeError"),
        ("{{ missing | tojson }}", "TypeError"),
    ],
)
def test_what_a_template_cannot_take_is_a_refusal_in_its_words(source, words):
    with pytest.raises(TemplateRefusal) as refusal:
        ChatTemplate(source).render([{"role": "assistant", "content": "x"}])
    assert words in str(refusal.value)


def test_arguments_of_the_request_do_not_replace_the_conversation():
    rendered = ChatTemplate("{{ messages[0].content }}{{ x }}").render(
        [{"role": "user", "content": "mine"}], template_args={"messages": [{"content": "other"}], "x": 1}
    )
    assert rendered == "mine1"


class TestLoading:
    def write(self, folder, **config):
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    def test_a_template_file_goes_before_the_configuration(self, tmp_path):
        self.write(tmp_path, chat_template="config", bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>")
        assert ChatTemplate.load(tmp_path).render([USER]) == "config"
        (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}{{ eos_token }}", encoding="utf-8")
        assert ChatTemplate.load(tmp_path).render([USER]) == "file <s></s>"

    def test_a_named_template_serves_tools(self, tmp_path):
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        self.write(tmp_path, chat_template=named)
        template = ChatTemplate.load(tmp_path)
        assert (template.render([USER]), template.render([USER], TOOLS)) == ("plain", "tools")

    def test_a_model_may_have_none(self, tmp_path):
        assert ChatTemplate.load(tmp_path) is None
        self.write(tmp_path, bos_token=None)
        assert ChatTemplate.load(tmp_path) is None

    def test_a_broken_template_says_where(self, tmp_path):
        self.write(tmp_path, chat_template="{% for %}")
        with pytest.raises(jinja2.TemplateSyntaxError):
            ChatTemplate.load(tmp_path)
