import json

import pytest

from services.gateway.text.model_family import detect_family


@pytest.mark.parametrize(
    ("template", "model_type", "family"),
    [
        ("… <tool_call>\\n …", "qwen2", "hermes"),
        ("… [TOOL_CALLS] …", "llama", "mistral"),
        ("… <|python_tag|> …", "llama", "llama3"),
        ("… 'ipython' …", "llama", "llama3"),
        ("nothing", "qwen3", "hermes"),
        ("nothing", "mistral", "mistral"),
        ("nothing", "llama", "hermes"),
    ],
)
def test_the_template_decides_then_the_type(tmp_path, template, model_type, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert detect_family(tmp_path) == family
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert detect_family(tmp_path) == family


def test_an_empty_folder_is_read_as_the_default(tmp_path):
    assert detect_family(tmp_path) == "hermes"
