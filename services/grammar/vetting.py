"""The process that compiles and vets constraints: what a client sends may make it slow, large or crash, and it may be killed.

It reads Compile messages from its standard input and writes a reply for each to its standard output, both framed by their length.
Vetting means to build the matcher as the worker will, with the model's own tokenizer, and to take a few tokens: only then do some
grammars turn out to allow nothing, or to be too large to handle.
"""

import json
import os
import re
import resource
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import BinaryIO, Final

import msgspec
from llguidance import LLMatcher, LLTokenizer

from services.grammar.compiler import Compiler, Draft
from services.grammar.config import Limits, ToolFormat
from services.grammar.refusal import Refusal
from shared.messages.constraints import Compiled, CompileReply, ConstraintRefused, Thinking, unpack_compile
from shared.messages.packing import pack

FRAME: Final = struct.Struct("<I")
"""Length of what follows, in bytes."""

NICENESS: Final = 5
"""On a machine that is full, a constraint of seconds leaves the cores to streams that run; one of milliseconds hardly waits."""
MAX_MESSAGE: Final = 300
NUM_PROBE_TOKENS: Final = 8
NUM_WALK_TOKENS: Final = 200
"""Far enough for the ways to read an ambiguous text to become many."""
NUM_DEAR_TOKENS: Final = 3
"""So many in a row are no accident: one alone may be the first to need a large part of the automaton."""
_MIB: Final = 1024 * 1024

_NOTHING_ALLOWED: Final = (
    "it allows no text at all: its rules refer to each other without end, or ask for characters that cannot be written"
)
_AMBIGUOUS: Final = "it is too ambiguous: a text has too many readings to follow them all"
_EXPLANATIONS: Final = (
    ("oneOf constraints", "`oneOf` cannot be enforced where two alternatives may hold at once; use `anyOf`"),
    ("NoExtension", _NOTHING_ALLOWED),
    ("too many expressions", "its patterns are too complex"),
    ("Unable to determine if regex is empty", "its patterns together are too complex"),
    ("Too many items", _AMBIGUOUS),
    ("Current row has", _AMBIGUOUS),
    ("LexerTooComplex", "its patterns are too complex"),
    ("ParserTooComplex", "its rules are too complex"),
)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a vetting process is started with, as JSON in its first argument."""

    model_path: str
    tool_format: ToolFormat
    limits: Limits


class Vetter:
    """Compiles and tries constraints for one model."""

    def __init__(self, compiler: Compiler, tokenizer: LLTokenizer) -> None:
        self._compiler = compiler
        self.tokenizer = tokenizer

    def answer(self, payload: bytes) -> CompileReply:
        """The reply to a packed Compile message."""
        limits = self._compiler.limits
        if len(payload) > limits.max_constraint_bytes:
            message = f"the constraint has {len(payload)} bytes, the limit is {limits.max_constraint_bytes}"
            return ConstraintRefused(message=message)
        try:
            asked = unpack_compile(payload)
            draft = self._compiler.compile(asked.constraint)
            grammar = self._vet(draft, asked.thinking)
        except Refusal as refusal:
            return ConstraintRefused(message=refusal.message, param=refusal.param)
        except RecursionError:
            return ConstraintRefused(message="the constraint is nested too deeply")
        except (msgspec.DecodeError, UnicodeError) as error:
            return ConstraintRefused(message=f"the constraint cannot be read: {error}")
        return Compiled(grammar=grammar, warnings=draft.warnings)

    def _vet(self, draft: Draft, thinking: Thinking | None) -> str:
        """The grammar for the worker. Raises Refusal when it could not use it, or only at too high a price."""
        started_s = time.process_time()
        for where, grammar in draft.parts:
            if error := self._find_error(grammar, num_tokens=0):
                raise Refusal(f"{where} cannot be enforced: {error}", draft.param)
        if error := self._find_error(draft.grammar, NUM_PROBE_TOKENS):
            raise Refusal(f"the constraint cannot be enforced: {error}", draft.param)
        if draft.is_free and (error := self._find_growth(draft.grammar)):
            raise Refusal(f"the constraint cannot be enforced: {error}", draft.param)
        grammar = draft.grammar
        if thinking is not None:
            grammar = self._compiler.behind_thinking(grammar, thinking)
            if error := self._find_error(grammar, num_tokens=0):
                raise Refusal(f"the constraint cannot be enforced behind thinking: {error}", draft.param)
        spent_s, limit_s = time.process_time() - started_s, self._compiler.limits.max_compile_s
        if spent_s > limit_s:
            raise Refusal(f"the constraint is too complex: {spent_s:.1f} s to compile, the limit is {limit_s} s")
        return grammar

    def _find_error(self, grammar: str, num_tokens: int) -> str:
        """What is wrong with a grammar at its first mask or in the `num_tokens` that follow, "" for nothing."""
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        for position in range(num_tokens + 1):
            mask = int.from_bytes(matcher.compute_bitmask(), "little") if not matcher.is_error() else 0
            if matcher.is_error():
                return explain(matcher.get_error())
            if position == 0 and not mask:
                return _NOTHING_ALLOWED
            for end in self.tokenizer.eos_tokens:
                mask &= ~(1 << end)
            if not mask:
                break
            matcher.consume_token(_lowest(mask))
        return ""

    def _find_growth(self, grammar: str) -> str:
        """Why a text under this grammar becomes too dear to follow as it grows, "" if it does not.

        The parser keeps all readings of an ambiguous text: their number, and with it the time that each token costs every
        stream of the worker, may grow without bound.
        """
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        random = Random(NUM_WALK_TOKENS)
        ends = sum(1 << end for end in self.tokenizer.eos_tokens)
        limit_ms, num_dear = self._compiler.limits.max_token_ms, 0
        for position in range(NUM_WALK_TOKENS):
            started_s = time.thread_time()
            mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~ends
            if matcher.is_error():
                return explain(matcher.get_error())
            if not mask:
                return ""
            above = random.randrange(mask.bit_length())
            matcher.consume_token(_lowest(mask >> above << above))
            spent_ms = (time.thread_time() - started_s) * 1000
            num_dear = num_dear + 1 if spent_ms > limit_ms else 0
            if num_dear == NUM_DEAR_TOKENS:
                return f"{_AMBIGUOUS}; token {position} takes {spent_ms:.0f} ms, the limit is {limit_ms:g}"
        return ""


def _lowest(mask: int) -> int:
    """The lowest bit that is set."""
    return (mask & -mask).bit_length() - 1


def explain(error: str) -> str:
    """The one line of llguidance's report that a client can act on."""
    for sign, explanation in _EXPLANATIONS:
        if sign in error:
            return explanation
    lines = [line.strip() for line in error.strip().splitlines()]
    cause = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    line = cause or lines[0] if lines else "no reason given"
    return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", line)[:MAX_MESSAGE]


def read_special_tokens(tokenizer_json: Path) -> dict[str, int]:
    """Text and id of the control tokens in a tokenizer.json."""
    added = json.loads(tokenizer_json.read_text(encoding="utf-8")).get("added_tokens", [])
    return {token["content"]: token["id"] for token in added if token.get("special")}


def load_tokenizer(model_path: Path) -> LLTokenizer:
    """The model's tokenizer, with the width of its logits and its end tokens. Raises OSError and ValueError."""
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    generation_path = model_path / "generation_config.json"
    generation = json.loads(generation_path.read_text(encoding="utf-8")) if generation_path.exists() else {}
    end_tokens = _end_tokens(generation) or _end_tokens(config)
    return LLTokenizer(
        str(model_path / "tokenizer.json"), n_vocab=config.get("vocab_size"), eos_token=end_tokens or None
    )


def _end_tokens(config: Mapping[str, object]) -> list[int]:
    ids = config.get("eos_token_id")
    return [ids] if isinstance(ids, int) else list(ids) if isinstance(ids, list) else []


def make_vetter(task: Task) -> Vetter:
    """Raises OSError and ValueError when the model's files cannot be used."""
    model_path = Path(task.model_path)
    special_tokens = read_special_tokens(model_path / "tokenizer.json")
    return Vetter(Compiler(task.limits, task.tool_format, special_tokens), load_tokenizer(model_path))


def serve(vetter: Vetter, requests: BinaryIO, replies: BinaryIO, limits: Limits) -> None:
    """Answer until the requests end. An empty frame says that the process is ready."""
    _limit_memory(limits.max_memory_mib)
    _write(replies, b"")
    while header := requests.read(FRAME.size):
        payload = requests.read(FRAME.unpack(header)[0])
        _limit_time(limits.max_compile_s)
        _write(replies, pack(vetter.answer(payload)))


def _write(stream: BinaryIO, payload: bytes) -> None:
    stream.write(FRAME.pack(len(payload)) + payload)
    stream.flush()


def _limit_memory(max_memory_mib: int) -> None:
    """Address space: what is used now and `max_memory_mib` more. Beyond, an allocation fails and the process dies."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    limit = used + max_memory_mib * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(max_compile_s: float) -> None:
    """Die of SIGXCPU even if the parent is no longer there to kill."""
    used_s = time.process_time()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s + max_compile_s) + 5, hard))


def main() -> int:
    os.nice(NICENESS)
    task = msgspec.json.decode(sys.argv[1], type=Task)
    # Whatever else may print in here must not end up between the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        vetter = make_vetter(task)
    except (OSError, ValueError, KeyError) as error:
        print(f"the model in {task.model_path!r} cannot be used: {error}", file=sys.stderr)
        return 1
    serve(vetter, sys.stdin.buffer, replies, task.limits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
