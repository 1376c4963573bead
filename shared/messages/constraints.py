"""gateway -> grammar: a constraint of the client becomes one vetted llguidance grammar, or a refusal by name."""

from typing import Any

import msgspec


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, tag="json_schema"):
    schema: Any
    strict: bool = True
    whitespace: str = "default"
    """"default": as json.dumps writes; "compact"; "flexible", bounded."""


class JsonObject(msgspec.Struct, frozen=True, kw_only=True, tag="json_object"):
    whitespace: str = "default"


class Regex(msgspec.Struct, frozen=True, kw_only=True, tag="regex"):
    pattern: str


class Ebnf(msgspec.Struct, frozen=True, kw_only=True, tag="ebnf"):
    """GBNF or Lark, told apart by their text."""

    grammar: str


class Choice(msgspec.Struct, frozen=True, kw_only=True, tag="choice"):
    options: tuple[str, ...]


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, tag="structural_tag"):
    spec: Any


class ToolCalls(msgspec.Struct, frozen=True, kw_only=True, tag="tool_calls"):
    tools: tuple[dict[str, Any], ...]
    mode: str
    """"required", "auto" (strict tools only), or the name of the one function that must be called"""
    parallel: bool = True
    whitespace: str = "default"
    tool_format: str = ""
    """How the calls are written: "hermes", "llama3" or "mistral", as the asker's parser reads them. Empty: the setting."""


Constraint = JsonSchema | JsonObject | Regex | Ebnf | Choice | StructuralTag | ToolCalls


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """The tags around what the model thinks before it answers; the constraint binds what stands behind `end`."""

    start: str
    end: str
    opened: bool
    """The prompt ends in `start`. Otherwise the model may think, or answer at once."""


class Compile(msgspec.Struct, frozen=True, kw_only=True, tag="compile"):
    constraint: Constraint
    thinking: Thinking | None = None


class Compiled(msgspec.Struct, frozen=True, kw_only=True, tag="compiled"):
    grammar: str
    warnings: tuple[str, ...] = ()


class ConstraintRefused(msgspec.Struct, frozen=True, kw_only=True, tag="constraint_refused"):
    """HTTP 400: what cannot be enforced, and where. With `retry_after_s` nothing is wrong but the moment: HTTP 503."""

    message: str
    param: str | None = None
    retry_after_s: float | None = None


unpack_compile = msgspec.msgpack.Decoder(Compile).decode
CompileReply = Compiled | ConstraintRefused
unpack_compile_reply = msgspec.msgpack.Decoder(CompileReply).decode
