"""What a chat template can do, found out by rendering a small conversation: templates do not say."""

from dataclasses import dataclass
from typing import Any

from services.tokenizer.chat_template import ChatTemplate, Message, TemplateRefusal

_TOOL = "probe_tool"
_SYSTEM = "probe_system"
_VALUE = "probe_value"
_TEXT = f'{{"v": "{_VALUE}"}}'
_SHORT_ID = "probe0001"
"""Nine letters and digits: Mistral's templates take no other."""
_CLIENT_ID = "call_0123456789abcdef"

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
    """What follows from how a template renders.

    system          renders system messages
    tools           renders the tools offered
    tool_calls      renders calls of the assistant
    text_arguments  wants the arguments of a call as JSON text, where most templates want the object
    short_call_ids  takes no ids of calls but those of nine letters and digits
    """

    system: bool
    tools: bool
    tool_calls: bool
    text_arguments: bool
    short_call_ids: bool


def traits_of(template: ChatTemplate) -> TemplateTraits:
    takes_objects = _VALUE in _render(template, _called({"v": _VALUE}, _SHORT_ID))
    takes_text = _VALUE in _render(template, _called(_TEXT, _SHORT_ID))
    takes_any_id = _VALUE in _render(template, _called({"v": _VALUE} if takes_objects else _TEXT, _CLIENT_ID))
    return TemplateTraits(
        system=_SYSTEM in _render(template, [{"role": "system", "content": _SYSTEM}, _QUESTION]),
        tools=_TOOL in _render(template, [_QUESTION], _TOOLS),
        tool_calls=takes_objects or takes_text,
        text_arguments=takes_text and not takes_objects,
        short_call_ids=(takes_objects or takes_text) and not takes_any_id,
    )


def _called(arguments: dict[str, str] | str, call_id: str) -> list[Message]:
    call = {"id": call_id, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    return [
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": _TOOL, "content": "r"},
    ]


def _render(template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    try:
        return template.render(messages, tools or (), add_generation_prompt=False)
    except TemplateRefusal:
        return ""
