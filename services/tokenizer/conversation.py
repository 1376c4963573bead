"""Messages as clients send them, made into messages as the model's template takes them."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.tokenizer.chat_template import Message
from services.tokenizer.placeholders import Placeholders
from services.tokenizer.template_traits import TemplateTraits

Tool = dict[str, Any]


class _Function(msgspec.Struct):
    name: str


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Shape(msgspec.Struct):
    """What is relied upon in a message; templates may look at more."""

    role: str
    content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


_TOOLS_INTRODUCTION = """\
You can call functions to help with the user's request. These are their signatures, inside <tools></tools> tags:
<tools>
"""
_TOOLS_INSTRUCTION = """
</tools>
To call a function, answer with a JSON object inside <tool_call></tool_call> tags, one pair of tags for each call:
<tool_call>
{"name": <name of the function>, "arguments": <object with its arguments>}
</tool_call>"""


def prepare(
    messages: Sequence[Message], tools: Sequence[Tool], traits: TemplateTraits, placeholders: Placeholders
) -> tuple[list[Message], list[Tool]]:
    """The messages and tools to render.

    What the template cannot render is written out in the Hermes format: tools into the system text, calls and their results
    into the conversation. Raises msgspec.ValidationError for messages of another shape than the gateway sends.
    """
    msgspec.convert(messages, list[_Shape])
    prepared = [_plain(message) for message in messages]
    if traits.tool_calls:
        prepared = [_with_arguments(message, traits, placeholders) for message in prepared]
        if traits.short_call_ids:
            prepared = _with_short_ids(prepared)
    else:
        prepared = list(_written_out(prepared))
    if tools and not traits.tools:
        return _with_tools_text(prepared, _tools_text(tools), traits), []
    return prepared, list(tools)


def _plain(message: Message) -> Message:
    """Without nulls, which templates print or stumble over; content is always there."""
    kept = {key: value for key, value in message.items() if value is not None}
    if kept["role"] == "developer":
        kept["role"] = "system"
    return {**kept, "content": kept.get("content", "")}


def _with_arguments(message: Message, traits: TemplateTraits, placeholders: Placeholders) -> Message:
    """Arguments in the history as the template wants them: an object, or what the client wrote if that is none."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = _parsed(function.get("arguments"))
        if traits.text_arguments:
            arguments = _text(arguments)
        elif isinstance(arguments, str):
            arguments = placeholders.hold(arguments, unquoted=True)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Calls numbered in nine digits, results likewise: who belongs to whom is all that the ids say."""
    short: dict[Any, str] = {}

    def shortened(item: Message, key: str) -> Message:
        return {**item, key: short.setdefault(item[key], f"{len(short):09d}")} if key in item else item

    renamed = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [shortened(call, "id") for call in calls]}
        renamed.append(shortened(message, "tool_call_id"))
    return renamed


def _parsed(arguments: Any) -> dict[str, Any] | str:
    """The object that `arguments` is or spells, else its text. Nothing at all counts as no arguments."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments if isinstance(arguments, dict) else _text(arguments)
    try:
        parsed = msgspec.json.decode(arguments)
    except (
        msgspec.DecodeError,
        RecursionError,
    ):  # not JSON, or nested beyond use: the model sees what the client wrote
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _written_out(messages: Iterable[Message]) -> Iterable[Message]:
    """Calls as text of the assistant, results as a message of the user: results that follow each other share one."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        if calls := message.get("tool_calls"):
            texts = ([message["content"]] if message["content"] else []) + [_call_text(call) for call in calls]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            yield {**rest, "content": "\n".join(texts)}
        else:
            yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {_text(_parsed(function.get("arguments")))}}}\n</tool_call>'


def _tools_text(tools: Sequence[Tool]) -> str:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _TOOLS_INTRODUCTION + signatures + _TOOLS_INSTRUCTION


def _with_tools_text(messages: list[Message], text: str, traits: TemplateTraits) -> list[Message]:
    """`text` behind the first system text; where the template takes none, in front of the first message."""
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if traits.system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
