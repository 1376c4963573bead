"""What a chat template can do, found out by rendering a small conversation: templates do not say."""

from dataclasses import dataclass
from typing import Any

from services.tokenizer.chat_template import ChatTemplate, Message, TemplateRefusal

_TOOL = "probe_tool"
_SYSTEM = "probe_system"
_VALUE = "probe_value"
_CALL_ID = "probe0001"
"""Nine letters and digits: Mistral's templates take no other."""

_QUESTION: Message = {"role": "user", "content": "q"}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "d",
            "parameters": {"type": "object", "properties": {"v": {"type": "string"}}, "required": ["v"]},
        },
    }
]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """system: renders system messages. tools: renders the tools offered. tool_calls: renders calls of the assistant.

    text_arguments: wants the arguments of a call as JSON text, where most templates want the object.
    """

    system: bool
    tools: bool
    tool_calls: bool
    text_arguments: bool


def traits_of(template: ChatTemplate) -> TemplateTraits:
    takes_objects = _VALUE in _render(template, _called({"v": _VALUE}))
    takes_text = _VALUE in _render(template, _called(f'{{"v": "{_VALUE}"}}'))
    return TemplateTraits(
        system=_SYSTEM in _render(template, [{"role": "system", "content": _SYSTEM}, _QUESTION]),
        tools=_TOOL in _render(template, [_QUESTION], _TOOLS),
        tool_calls=takes_objects or takes_text,
        text_arguments=takes_text and not takes_objects,
    )


def _called(arguments: dict[str, str] | str) -> list[Message]:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    return [
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _CALL_ID, "name": _TOOL, "content": "r"},
    ]


def _render(template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    try:
        return template.render(messages, tools or (), add_generation_prompt=False)
    except TemplateRefusal:
        return ""
