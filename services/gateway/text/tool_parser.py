"""Tool calls in the text a model writes, found while it is written: one parser for streams and for whole answers.

It is a machine over characters, so the way the text is cut into pieces cannot matter. Nothing is lost: a block that turns
out to be no call before its start was announced becomes content as it stands; once announced, a call keeps the arguments it
has and what follows the first wrong character becomes content.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.text.call_reader import CallReader, Verdict
from services.gateway.text.tool_calls import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    MakeCallId,
    merge,
    random_call_id,
)


@dataclass(frozen=True, slots=True)
class Format:
    """How a model family writes tool calls.

    opener     what stands in front of a call
    closer     what stands behind it; may be missing at the end of the answer
    separator  what stands between the calls of one list; empty when the opener does not open lists
    bare       a JSON object where nothing but space or calls came before may be a call without an opener
    """

    opener: str
    closer: str
    separator: str = ""
    bare: bool = False


HERMES = Format(opener="<tool_call>", closer="</tool_call>")
LLAMA3 = Format(opener="<|python_tag|>", closer=";", bare=True)
MISTRAL = Format(opener="[TOOL_CALLS]", closer="]", separator=",")


class ToolParser:
    """Splits one answer into content and tool calls.

    num_calls     calls announced so far
    is_call_open  the last of them is not complete: the answer was cut, or its arguments went wrong
    """

    def __init__(self, format: Format, make_id: MakeCallId = random_call_id) -> None:
        self.num_calls = 0
        self.is_call_open = False
        self._format = format
        self._make_id = make_id
        self._state: Callable[[str], None] = self._content
        self._deltas: list[Delta] = []
        self._space = ""
        """Space next to a call: dropped between calls and at the end, content where text follows."""
        self._raw = ""
        """Text read behind it that is in no delta yet."""
        self._at_edge = True
        """Nothing but space since the beginning or the last call."""
        self._in_list = False
        self._reader = CallReader()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see even where the model has control tokens for them."""
        return (self._format.opener, self._format.closer)

    def push(self, text: str) -> list[Delta]:
        """What `text` adds, neighbours joined."""
        position = 0
        while position < len(text):
            if num_plain := self._num_plain(text, position):
                self._pass_on(text[position : position + num_plain])
                position += num_plain
            else:
                self._state(text[position])
                position += 1
        return self._take()

    def finish(self) -> list[Delta]:
        """What was held back; the answer is over."""
        if self._state != self._closing and (self._raw or self.num_calls == 0):
            self._release(len(self._raw))
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = merge(self._deltas), []
        return deltas

    def _num_plain(self, text: str, position: int) -> int:
        """How many characters from `position` on leave the state as it is: most of a text, taken without a look at each."""
        if self._state == self._call:
            return self._reader.num_plain(text, position) if self.is_call_open else 0
        if self._state != self._content or self._raw or self._at_edge:
            return 0
        next_opener = text.find(self._format.opener[0], position)
        return (next_opener if next_opener >= 0 else len(text)) - position

    def _pass_on(self, text: str) -> None:
        in_call = self._state == self._call
        self._deltas.append(CallArguments(self.num_calls - 1, text) if in_call else Content(text))

    def _content(self, character: str) -> None:
        """Text, as long as no call begins. What could still be an opener is held, and so is space next to calls."""
        if self._at_edge and not self._raw and character.isspace():
            self._space += character
            return
        self._raw += character
        opener = self._format.opener
        if self._raw == opener:
            self._state = self._opened
        elif self._raw == "{" and self._at_edge and self._format.bare:
            self._begin_call()
        elif not opener.startswith(self._raw):
            held = next(n for n in range(len(opener) - 1, -1, -1) if n == 0 or self._raw.endswith(opener[:n]))
            self._release(len(self._raw) - held)

    def _release(self, length: int) -> None:
        """The next `length` characters held are content, and with them the space in front."""
        if text := self._space + self._raw[:length]:
            self._deltas.append(Content(text))
        self._space, self._raw = "", self._raw[length:]
        self._at_edge = False

    def _opened(self, character: str) -> None:
        """Behind an opener or a separator: an object must come."""
        self._raw += character
        if character == "{":
            self._begin_call()
        elif character == "[" and self._format.separator and not self._in_list:
            self._in_list = True
        elif not character.isspace():
            self._raw = self._raw[:-1]
            self._reject(character)

    def _begin_call(self) -> None:
        self._reader = CallReader()
        self._reader.feed("{")
        self._state = self._call

    def _call(self, character: str) -> None:
        reader = self._reader
        verdict = reader.feed(character)
        if verdict is Verdict.BAD or (verdict is Verdict.DONE and not self._is_call(reader)):
            self._reject(character)
            return
        self._raw += character
        if reader.name is not None and (reader.has_arguments or verdict is Verdict.DONE):
            self._announce(reader.name)
            if arguments := reader.take_arguments() or ("" if reader.has_arguments else "{}"):
                self._deltas.append(CallArguments(self.num_calls - 1, arguments))
                self._raw = ""
        if verdict is Verdict.DONE:
            self._raw = ""
            self.is_call_open = False
            self._at_edge = True
            self._state = self._closing

    def _is_call(self, reader: CallReader) -> bool:
        """Where nothing marks a call, one without arguments may as well be an answer in JSON."""
        return reader.name is not None and (reader.has_arguments or not self._format.bare)

    def _announce(self, name: str) -> None:
        if not self.is_call_open:
            self.is_call_open = True
            self._space = self._raw = ""
            self._deltas.append(CallStart(self.num_calls, self._make_id(), name))
            self.num_calls += 1

    def _reject(self, character: str) -> None:
        """What was read is content; `character` comes next and may begin an opener."""
        self._release(len(self._raw))
        self._in_list = False
        self._state = self._content
        self._content(character)

    def _closing(self, character: str) -> None:
        """Behind a complete call: closer or separator; anything else belongs to the text after it."""
        if not self._raw and character.isspace():
            self._space += character
            return
        self._raw += character
        closer = self._format.closer
        if self._in_list and self._raw == self._format.separator:
            self._state = self._opened
        elif self._raw == closer:
            self._space = self._raw = ""
            self._in_list = False
            self._state = self._content
        elif not closer.startswith(self._raw):
            raw, self._raw = self._raw, ""
            self._in_list = False
            self._state = self._content
            for unread in raw:
                self._state(unread)


_FORMATS = {"hermes": HERMES, "qwen": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}
FORMAT_NAMES = tuple(_FORMATS)


def parser_for(name: str, make_id: MakeCallId = random_call_id) -> ToolParser:
    """A new parser for one answer. Raises ValueError for an unknown format."""
    if name not in _FORMATS:
        raise ValueError(f"tool_parser is {name!r}, known are {', '.join(FORMAT_NAMES)}")
    return ToolParser(_FORMATS[name], make_id)
