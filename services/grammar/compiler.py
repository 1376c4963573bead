"""From a constraint to the text of an llguidance grammar. Pure; whether llguidance takes the text is for `vetting` to find out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from llguidance import LLMatcher

from services.grammar.config import Limits, ToolFormat
from services.grammar.ebnf import to_lark
from services.grammar.json_schema import normalise
from services.grammar.lark import json_options, literal
from services.grammar.refusal import Refusal
from services.grammar.structural_tag import StructuralTagGrammar
from services.grammar.thinking import behind_thinking
from services.grammar.tools import CALL_STYLES, CallStyle, read_tools, tool_grammar
from shared.messages.constraints import (
    Choice,
    Constraint,
    Ebnf,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
    Thinking,
    ToolCalls,
)


@dataclass(frozen=True, slots=True)
class Draft:
    """A grammar that nobody has tried yet.

    grammar   what LLMatcher takes
    warnings  for the client
    parts     (where, grammar) of the schemas inside, tried first so that a complaint names its place
    param     the field of the request that complaints are about, None for the constraint itself
    is_free   its rules are the client's own: nothing but a trial says what it costs to follow them
    """

    grammar: str
    warnings: tuple[str, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    param: str | None = None
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class Compiler:
    """special_tokens: text and id of the tokens that the model has as control tokens."""

    limits: Limits
    tool_format: ToolFormat
    special_tokens: Mapping[str, int]

    def compile(self, constraint: Constraint) -> Draft:
        """Raises Refusal."""
        match constraint:
            case JsonSchema(schema=schema, whitespace=whitespace):
                normalised, warnings = normalise(schema, self.limits)
                return Draft(json_grammar(normalised, whitespace), tuple(warnings))
            case JsonObject(whitespace=whitespace):
                return Draft(json_grammar({"type": "object"}, whitespace))
            case Regex(pattern=pattern):
                return Draft(LLMatcher.grammar_from_regex(pattern))
            case Ebnf(grammar=text):
                return Draft(LLMatcher.grammar_from_lark(to_lark(text)), is_free=True)
            case Choice(options=options):
                return Draft(self._choice(options))
            case StructuralTag(spec=spec):
                builder = StructuralTagGrammar(self.limits, self.special_tokens)
                grammar = builder.build(spec)
                parts = tuple((where, json_grammar(schema, "default")) for where, schema in builder.schemas)
                return Draft(grammar, tuple(builder.warnings), parts)
            case ToolCalls():
                tools, warnings = read_tools(constraint, self.limits)
                grammar = tool_grammar(constraint, tools, self._call_style(constraint), self.special_tokens)
                parts = tuple((tool.where, json_grammar(tool.parameters, "default")) for tool in tools)
                return Draft(grammar, tuple(warnings), parts, param="tools")
            case _:
                assert_never(constraint)

    def behind_thinking(self, grammar: str, thinking: Thinking) -> str:
        """`grammar` for a model that may think before it answers. Raises Refusal."""
        return behind_thinking(grammar, thinking, self.special_tokens)

    def _call_style(self, constraint: ToolCalls) -> CallStyle:
        name = constraint.tool_format or self.tool_format
        style = CALL_STYLES.get(name)
        if style is None:
            raise Refusal(f"the tool format {name!r} is none of {', '.join(CALL_STYLES)}", "tools")
        return style

    def _choice(self, options: tuple[str, ...]) -> str:
        if not options:
            raise Refusal("a choice needs at least one option")
        if len(options) > self.limits.max_alternatives:
            raise Refusal(f"a choice of {len(options)} options, the limit is {self.limits.max_alternatives}")
        # One terminal, not a rule of alternatives: options that begin alike share states of one automaton.
        alternatives = " | ".join(literal(option) or '""' for option in dict.fromkeys(options))
        return f"CHOICE: {alternatives}\nstart: CHOICE\n"


def json_grammar(schema: Mapping[str, object], whitespace: str) -> str:
    """The grammar of one JSON value that fits a normalised schema."""
    grammar: str = LLMatcher.grammar_from_json_schema(
        json.dumps(schema, ensure_ascii=False), overrides=json_options(whitespace)
    )
    return grammar
