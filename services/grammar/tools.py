"""Tool calls, written the way the model's family writes them, so that the gateway's parser for that family reads them.

| format  | one call                                                                | several calls               |
|---------|-------------------------------------------------------------------------|-----------------------------|
| hermes  | `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`          | one after the other, `\\n`   |
| llama3  | `{"name": "f", "parameters": {...}}`                                    | with `; ` in between        |
| mistral | `[TOOL_CALLS][{"name": "f", "arguments": {...}}]`                       | in the same list, with `, ` |

"required" and a named function produce calls and nothing else. "auto" leaves the text free up to the marker of a call; from there
on, the call is one of the tools offered. (llama3 has no marker: there an answer that begins with `{` is a call.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from services.grammar.config import Limits
from services.grammar.json_schema import normalise
from services.grammar.lark import LarkGrammar, json_options, json_value, literal, sequence
from services.grammar.refusal import Refusal
from shared.messages.constraints import ToolCalls

MAX_PARALLEL_CALLS: Final = 32
ARGUMENTS_ANY_OBJECT: Final = {"type": "object"}


class CallStyle(NamedTuple):
    """Text around the calls: `opening` call `between` call `closing`, a call being `begin` {JSON} `end`."""

    opening: str
    begin: str
    arguments_key: str
    end: str
    between: str
    closing: str


CALL_STYLES: Final[Mapping[str, CallStyle]] = {
    "hermes": CallStyle("", "<tool_call>\n", "arguments", "\n</tool_call>", "\n", ""),
    "llama3": CallStyle("", "", "parameters", "", "; ", ""),
    "mistral": CallStyle("[TOOL_CALLS][", "", "arguments", "", ", ", "]"),
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client with its normalised parameters. `where` names it in messages."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    where: str


def read_tools(constraint: ToolCalls, limits: Limits) -> tuple[list[Tool], list[str]]:
    """The tools that may be called, and warnings. Raises Refusal."""
    if not constraint.tools:
        raise Refusal("a tool call is asked for, but no tools are given", "tools")
    wanted = None if constraint.mode in ("required", "auto") else constraint.mode
    tools: dict[str, Tool] = {}
    warnings: list[str] = []
    for index, spec in enumerate(constraint.tools):
        where = f"tools[{index}]"
        function = spec.get("function")
        if spec.get("type", "function") != "function" or not isinstance(function, dict):
            raise Refusal(f"{where} is not a function", "tools")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise Refusal(f"{where}.function.name must be a string, not empty", "tools")
        if name in tools:
            raise Refusal(f"{where}.function.name {name!r} is given twice", "tools")
        is_strict = function.get("strict") is True
        parameters: Mapping[str, Any] = ARGUMENTS_ANY_OBJECT
        # Under "auto", only strict tools have asked for their schema to be enforced.
        if constraint.mode != "auto" or is_strict:
            parameters, found = _parameters(function.get("parameters"), f"{where}.function.parameters", limits)
            warnings += found
        tools[name] = Tool(name, parameters, is_strict, f"{where}.function.parameters")
    if wanted is not None and wanted not in tools:
        raise Refusal(f"the function {wanted!r} is not in tools", "tool_choice")
    return [tool for tool in tools.values() if wanted in (None, tool.name)], warnings


def tool_grammar(constraint: ToolCalls, tools: list[Tool], style: CallStyle, special_tokens: Mapping[str, int]) -> str:
    """The Lark grammar of an answer under `constraint.mode`."""
    grammar = LarkGrammar(special_tokens)
    options = json_options(constraint.whitespace)
    bodies = " | ".join(grammar.rule(_call_body(grammar, tool, style, options)) for tool in tools)
    body = grammar.rule(bodies)
    num_more = MAX_PARALLEL_CALLS - 1 if constraint.parallel and constraint.mode in ("required", "auto") else 0
    if constraint.mode == "auto":
        return grammar.finish(_free_text_or_calls(grammar, style, body, num_more))
    return grammar.finish(_calls(grammar, style, body, num_more))


def _calls(grammar: LarkGrammar, style: CallStyle, body: str, num_more: int) -> str:
    call = grammar.rule(sequence(grammar.marker(style.begin), body))
    more = f"({sequence(grammar.marker(style.between), call)}){{0,{num_more}}}" if num_more else ""
    return sequence(grammar.marker(style.opening), call, more, literal(style.closing))


def _free_text_or_calls(grammar: LarkGrammar, style: CallStyle, body: str, num_more: int) -> str:
    text = grammar.rule(grammar.TEXT)
    if style.opening:
        marker, rest = style.opening[:-1], style.opening[-1:]
        more = f"({sequence(literal(style.between), body)}){{0,{num_more}}}" if num_more else ""
        return f"{text} | {sequence(grammar.text_until(marker), literal(rest), body, more, literal(style.closing))}"
    if style.begin:
        marker, _, rest = style.begin.partition("\n")
        call = grammar.rule(sequence(grammar.text_until(marker), literal("\n" + rest), body))
        return f"{call}{{0,{num_more + 1}}} {text}" if num_more else f"{text} | {call}"
    other = grammar.rule("/[^{](?s:.*)/")
    return f"{_calls(grammar, style, body, num_more)} | {other} |"


def _call_body(grammar: LarkGrammar, tool: Tool, style: CallStyle, options: Mapping[str, Any]) -> str:
    comma, colon = (", ", ": ") if options["item_separator"] == ", " else (",", ":")
    opening = f'{{"name"{colon}{literal(tool.name)}{comma}"{style.arguments_key}"{colon}'
    return sequence(literal(opening), json_value(tool.parameters, options), literal("}"), grammar.marker(style.end))


def _parameters(schema: Any, where: str, limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """Normalised parameters, which are an object in any case. Left out, the function takes none."""
    if schema is None:
        return {"type": "object", "additionalProperties": False}, []
    try:
        normalised, warnings = normalise(schema, limits)
    except Refusal as refusal:
        raise Refusal(f"{where}: {refusal.message}", "tools") from None
    types = normalised.get("type", "object")
    if types != "object" and "object" not in types:
        raise Refusal(f"{where}: the arguments of a function are an object, not {types!r}", "tools")
    return normalised | {"type": "object"}, [f"{where}: {warning}" for warning in warnings]
