"""Separates what a model thinks from what it answers."""

from enum import Enum, auto
from typing import NamedTuple


class Reasoning(NamedTuple):
    text: str


class Answer(NamedTuple):
    text: str


Piece = Reasoning | Answer


class _Phase(Enum):
    START = auto()
    THINKING = auto()
    BEHIND_THINKING = auto()
    """Only space came since the end tag."""
    ANSWER = auto()


class ReasoningParser:
    """Splits `<think>…</think>answer`, in whatever pieces it arrives.

    Thinking can only come first: a later start tag is text like any other. Space directly inside the tags and directly
    behind the end tag belongs to neither part; without thinking the answer is passed on as it is. With `opened`, the prompt
    ended in the start tag and the model goes on inside; whether it repeats the tag makes no difference.
    """

    def __init__(self, start: str = "<think>", end: str = "</think>", *, opened: bool = False) -> None:
        assert start and end, "tags are never empty"
        self._start, self._end = start, end
        self._opened = opened
        self._phase = _Phase.START
        self._held = ""
        self._is_first = True
        """Nothing of the reasoning was passed on."""

    def push(self, text: str) -> list[Piece]:
        """What `text` adds: at most one piece of reasoning, then at most one of the answer."""
        self._held += text
        if self._phase is _Phase.START:
            self._find_start()
        reasoning = self._take_reasoning() if self._phase is _Phase.THINKING else ""
        answer = self._take_answer() if self._phase in (_Phase.BEHIND_THINKING, _Phase.ANSWER) else ""
        return _pieces(reasoning, answer)

    def finish(self) -> list[Piece]:
        """What was held back: unfinished thinking stays reasoning."""
        held, self._held = self._held, ""
        if self._phase is _Phase.THINKING or (self._phase is _Phase.START and self._opened):
            return _pieces(held.lstrip() if self._is_first else held, "")
        return _pieces("", held)

    def _find_start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._start):
            self._phase = _Phase.THINKING
            self._held = text[len(self._start) :]
        elif not self._start.startswith(text):
            self._phase = _Phase.THINKING if self._opened else _Phase.ANSWER

    def _take_reasoning(self) -> str:
        if self._is_first:
            self._held = self._held.lstrip()
        ends_at = self._held.find(self._end)
        if ends_at >= 0:
            text, self._held = self._held[:ends_at].rstrip(), self._held[ends_at + len(self._end) :]
            self._phase = _Phase.BEHIND_THINKING
        else:  # what could be the end tag is held, and the space in front of it
            num_held = next(
                n for n in range(len(self._end) - 1, -1, -1) if n == 0 or self._held.endswith(self._end[:n])
            )
            text = self._held[: len(self._held) - num_held].rstrip()
            self._held = self._held[len(text) :]
        self._is_first = self._is_first and not text
        return text

    def _take_answer(self) -> str:
        text = self._held
        if self._phase is _Phase.BEHIND_THINKING:
            text = text.lstrip()
            if text:
                self._phase = _Phase.ANSWER
        self._held = ""
        return text


def _pieces(reasoning: str, answer: str) -> list[Piece]:
    pieces: list[Piece] = []
    if reasoning:
        pieces.append(Reasoning(reasoning))
    if answer:
        pieces.append(Answer(answer))
    return pieces
