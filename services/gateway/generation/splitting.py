"""Takes generated text apart: thinking, content, tool calls."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.gateway.generation.plan import Output
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.reasoning import Reasoning, ReasoningParser
from services.gateway.text.tool_calls import CallArguments, CallStart, Content
from services.gateway.text.tool_parser import ToolParser, parser_for
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.constraints import Thinking

CallPiece = CallStart | CallArguments

REASONING_TAGS = {"think": ("<think>", "</think>")}
"""Formats of thinking text by their name in the settings."""


_TAIL_TOKENS = 16
"""Enough of a prompt's end to spell a tag and the space behind it."""


def thinking_after(prompt: Sequence[int], output: Output, vocabulary: Vocabulary) -> Thinking | None:
    """How the answer to `prompt` (token ids) may begin with thinking; None where thinking is not told apart."""
    if output.reasoning_parser is None:
        return None
    start, end = REASONING_TAGS[output.reasoning_parser]
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=False)
    tail = detokenizer.push(prompt[-_TAIL_TOKENS:]) + detokenizer.finish()
    return Thinking(start=start, end=end, opened=tail.rstrip().endswith(start))


class Split(NamedTuple):
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


class Splitter:
    """The parsers of one answer, in the order the model writes: it thinks, then it answers or calls.

    marker_ids  special tokens that the parsers must see although special tokens are hidden
    """

    def __init__(self, output: Output, vocabulary: Vocabulary) -> None:
        markers: list[str] = []
        self._reasoning: ReasoningParser | None = None
        if output.reasoning_parser is not None:
            start, end = REASONING_TAGS[output.reasoning_parser]
            self._reasoning = ReasoningParser(start, end, opened=output.starts_inside_reasoning)
            markers += (start, end)
        self._tools: ToolParser | None = None
        if output.tool_parser is not None:
            self._tools = parser_for(output.tool_parser)
            markers += self._tools.markers
        self.marker_ids = vocabulary.ids_of(markers) if markers else frozenset[int]()

    def push(self, text: str) -> Split:
        if self._reasoning is None and self._tools is None:
            return Split(text)
        return self._split(text, last=False)

    def finish(self, text: str) -> Split:
        """The last text, and everything held back."""
        if self._reasoning is None and self._tools is None:
            return Split(text)
        return self._split(text, last=True)

    def _split(self, text: str, *, last: bool) -> Split:
        reasoning = ""
        if self._reasoning is not None:
            pieces = [*self._reasoning.push(text), *(self._reasoning.finish() if last else ())]
            reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
            text = "".join(piece.text for piece in pieces if not isinstance(piece, Reasoning))
        if self._tools is None:
            return Split(text, reasoning)
        found = [*self._tools.push(text), *(self._tools.finish() if last else ())]
        return Split(_joined(found), reasoning, tuple(delta for delta in found if not isinstance(delta, Content)))


def _joined(deltas: Iterable[Content | CallPiece]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Content))
