"""The model's chat template: sandboxed Jinja, with the filters, functions and white space rules of transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise on data it was not written for."""
_SPECIAL_TOKEN_FIELDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateRefusal(Exception):
    """The template does not take these messages: its own words, or what went wrong in it."""


class ChatTemplate:
    """Renders messages into the text that the model was trained on."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        """`tool_source` is used when tools are given. Raises jinja2.TemplateSyntaxError."""
        environment = _environment()
        self._special_tokens = dict(special_tokens or {})
        self._template = environment.from_string(source)
        self._tool_template = self._template if tool_source is None else environment.from_string(tool_source)

    @classmethod
    def load(cls, model_path: str | Path) -> "ChatTemplate | None":
        """The template of a model's folder; None where there is none.

        chat_template.jinja goes before the `chat_template` of tokenizer_config.json, which may be a list of named templates.
        """
        folder = Path(model_path)
        config = _read_json(folder / "tokenizer_config.json")
        sources = _named_sources(config.get("chat_template"))
        if (file := folder / "chat_template.jinja").is_file():
            sources["default"] = file.read_text(encoding="utf-8")
        for extra in sorted(folder.glob("additional_chat_templates/*.jinja")):
            sources[extra.stem] = extra.read_text(encoding="utf-8")
        if "default" not in sources:
            return None
        return cls(
            sources["default"],
            special_tokens=_special_tokens(_read_json(folder / "special_tokens_map.json") | config),
            tool_source=sources.get("tool_use"),
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises TemplateRefusal."""
        template = self._tool_template if tools else self._template
        variables = {
            **self._special_tokens,
            **(template_args or {}),
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except _RENDER_ERRORS as error:
            told = isinstance(error, jinja2.TemplateError) and not isinstance(error, jinja2.TemplateRuntimeError)
            reason = str(error) if told else f"{type(error).__name__}: {error}"
            raise TemplateRefusal(reason or "no reason given") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its content is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  # the type that Jinja declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _named_sources(field: Any) -> dict[str, str]:
    match field:
        case str(source):
            return {"default": source}
        case list(entries):
            return {entry["name"]: entry["template"] for entry in entries}
    return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text; a token may be written out with its flags."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_FIELDS:
        match config.get(name):
            case str(text) | {"content": str(text)}:
                tokens[name] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
