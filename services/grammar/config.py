"""Settings of the grammar service."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.config import ServiceConfig

ToolFormat = Literal["hermes", "llama3", "mistral"]
"""How a model family writes tool calls; see services.grammar.tools."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one constraint may cost. More than that is refused, with both numbers."""

    max_constraint_bytes: int
    max_depth: int
    max_nodes: int
    max_alternatives: int
    max_compile_s: float
    max_token_ms: float
    max_memory_mib: int


class GrammarConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tool_format: Annotated[ToolFormat, Meta(description="How the model writes tool calls")] = "hermes"
    num_processes: Annotated[int, Meta(ge=1, le=64, description="Processes that compile and vet constraints")] = 2
    max_constraint_bytes: Annotated[
        int, Meta(ge=1, description="Size of a constraint: its schema, pattern or grammar as a message")
    ] = 262_144
    max_depth: Annotated[int, Meta(ge=1, le=200, description="Levels of schemas inside schemas")] = 64
    max_nodes: Annotated[int, Meta(ge=1, description="Schemas and literal values in one constraint")] = 20_000
    max_alternatives: Annotated[
        int, Meta(ge=1, description="Alternatives in one enum, anyOf, oneOf or choice, and properties of one object")
    ] = 4096
    max_compile_s: Annotated[
        float, Meta(gt=0, description="Processor seconds to compile a constraint and compute its first mask")
    ] = 1.5
    max_token_ms: Annotated[
        float,
        Meta(gt=0, description="Processor milliseconds to see what a grammar allows next, once a text is under way"),
    ] = 10.0
    vet_timeout_s: Annotated[
        float, Meta(gt=0, description="Wall-clock seconds after which the vetting process is killed")
    ] = 2.0
    max_memory_mib: Annotated[int, Meta(ge=64, description="Memory that vetting one constraint may take")] = 768
    answer_timeout_s: Annotated[
        float, Meta(gt=0, description="A constraint is answered within this time, in the worst case by 'try again'")
    ] = 2.8
    max_waiting: Annotated[int, Meta(ge=1, description="Constraints that may wait for a vetting process")] = 256
    max_cached: Annotated[int, Meta(ge=1, description="Answers kept, grammars and refusals alike")] = 2048
    max_cached_mib: Annotated[int, Meta(ge=1, description="Memory for the answers kept")] = 64

    @property
    def limits(self) -> Limits:
        return Limits(
            max_constraint_bytes=self.max_constraint_bytes,
            max_depth=self.max_depth,
            max_nodes=self.max_nodes,
            max_alternatives=self.max_alternatives,
            max_compile_s=self.max_compile_s,
            max_token_ms=self.max_token_ms,
            max_memory_mib=self.max_memory_mib,
        )
