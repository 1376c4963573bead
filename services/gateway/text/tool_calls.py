"""What a tool parser finds in generated text."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The `index`-th call of the answer, counted from 0; comes before its arguments."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; the pieces of one finished call are a JSON object."""

    index: int
    text: str


Delta = Content | CallStart | CallArguments
MakeCallId = Callable[[], str]


def random_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbours of the same kind and call."""
    merged: list[Delta] = []
    for delta in deltas:
        match merged, delta:
            case [*_, Content(before)], Content(text):
                merged[-1] = Content(before + text)
            case [*_, CallArguments(same, before)], CallArguments(index, text) if index == same:
                merged[-1] = CallArguments(index, before + text)
            case _:
                merged.append(delta)
    return merged
