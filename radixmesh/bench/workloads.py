"""What a server is loaded with: kinds of work, each with its concurrency, from texts that a seed decides.

Output lengths are fixed (`ignore_eos`), so that two servers do the same work; only the JSON workloads end by themselves.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixmesh.client import Message
from radixmesh.errors import UsageError

_NAMES = ("Ada", "Bo", "Carla", "Dmitri", "Eun", "Farah", "Goran", "Hana", "Ivo", "Jaya")
_THINGS = ("apples", "tickets", "marbles", "stamps", "cookies", "pencils", "shells", "bottles")
_PLACES = ("at the market", "on a farm", "in the library", "at a fair", "in the harbour", "at school")
_MIN_QUESTIONS = 150

PROFILE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "maxLength": 30},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 2, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "email", "tags", "active"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request, and what the same client says next once it is answered."""

    prompt: str | list[Message]
    params: dict[str, Any]
    follow_ups: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        return 1 + len(self.follow_ups)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    concurrency: int
    """Calls that run at the same time."""
    calls: list[Call] = field(repr=False)


class Texts:
    """Questions and worked answers. A seed names them all, and marks them: no two seeds share a prefix in a cache."""

    def __init__(self, seed: str, given: Sequence[str] = ()) -> None:
        self._mark = seed
        rng = random.Random(seed)
        self.questions = rng.sample(given, len(given)) if given else [_question(rng) for _ in range(300)]

    def marked(self, label: object, text: str) -> str:
        return f"[{self._mark}-{label}] {text}"


def _question(rng: random.Random) -> str:
    """A word problem of some 60 tokens."""
    one, two = rng.sample(_NAMES, 2)
    thing, place = rng.choice(_THINGS), rng.choice(_PLACES)
    many, price, share = rng.randrange(12, 90), rng.randrange(2, 15), rng.randrange(2, 9)
    return (
        f"{one} and {two} meet {place}. {one} brings {many} {thing} and sells them for {price} coins each, "
        f"while {two} brings {share} times as many and sells them for half the price. They spend {share + price} coins on "
        f"lunch and divide what is left into {share} equal parts. How many coins are in each part?"
    )


def read_questions(file: Path) -> list[str]:
    """The `question` of each line of a JSONL file. Raises UsageError when there are too few to fill the workloads."""
    try:
        questions = [
            str(json.loads(line)["question"]) for line in file.read_text(encoding="utf-8").splitlines() if line
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"--questions {file}: each line must be a JSON object with a `question`: {error}") from error
    if len(questions) < _MIN_QUESTIONS:
        raise UsageError(f"--questions {file} has {len(questions)} questions, at least {_MIN_QUESTIONS} are needed")
    return questions


def _fixed(tokens: int) -> dict[str, Any]:
    return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _chat(texts: Texts, width: int) -> list[Call]:
    """Unrelated questions."""
    count = 6 if width == 1 else max(24, 2 * width)
    return [Call(_user(texts.marked(i, texts.questions[i])), _fixed(64)) for i in range(count)]


def _few_shot(texts: Texts) -> list[Call]:
    """Many questions behind the same worked examples."""
    shots = "".join(f"Question: {q}\nAnswer: It takes a few steps.\n\n" for q in texts.questions[-6:])
    prefix = texts.marked("shots", shots)
    return [Call(f"{prefix}Question: {q}\nAnswer:", _fixed(32)) for q in texts.questions[:48]]


def _tree(texts: Texts) -> list[Call]:
    """Prefixes that branch: a root that all share, four branches, eight leaves each."""
    root = texts.marked("root", " ".join(texts.questions[-3:]))
    branches = [f"{root}\nContext {b}: {texts.questions[100 + b]} {texts.questions[110 + b]}\n" for b in range(4)]
    return [
        Call(f"{branch}Question: {texts.questions[10 * b + leaf]}\nAnswer:", _fixed(32))
        for b, branch in enumerate(branches)
        for leaf in range(8)
    ]


def _multi_turn(texts: Texts) -> list[Call]:
    """Conversations of four turns."""
    return [
        Call(_user(texts.marked(i, texts.questions[i])), _fixed(48), tuple(texts.questions[50 + 3 * i : 53 + 3 * i]))
        for i in range(8)
    ]


def _long_prompt(texts: Texts) -> list[Call]:
    """Prompts of some 2,000 tokens, one after the other."""
    text = " ".join(texts.questions[:24])
    return [Call(texts.marked(i, text), _fixed(8)) for i in range(3)]


def _json(texts: Texts, width: int) -> list[Call]:
    """Documents that must fit a schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "profile", "schema": PROFILE_SCHEMA, "strict": True}}
    params = {"max_tokens": 200, "temperature": 0, "response_format": schema}
    return [Call(_user(texts.marked(i, "Invent a user profile as JSON.")), params) for i in range(4 * width)]


_KINDS: dict[str, tuple[int, Callable[[Texts], list[Call]]]] = {
    "chat-1": (1, lambda texts: _chat(texts, 1)),
    "chat-8": (8, lambda texts: _chat(texts, 8)),
    "chat-32": (32, lambda texts: _chat(texts, 32)),
    "few-shot": (16, _few_shot),
    "tree": (8, _tree),
    "multi-turn": (8, _multi_turn),
    "long-prompt": (1, _long_prompt),
    "json-1": (1, lambda texts: _json(texts, 1)),
    "json-8": (8, lambda texts: _json(texts, 8)),
}
WORKLOADS = tuple(_KINDS)


def build(name: str, texts: Texts) -> Workload:
    concurrency, calls = _KINDS[name]
    return Workload(name, concurrency, calls(texts))
