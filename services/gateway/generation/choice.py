"""One choice of a request: emissions of the scheduler in, deltas for the client and commands for the scheduler out.

Tokens pass through four stages, each of which holds back only what a later token could still change: positions (drop what was
seen, notice a gap), detokenizer (an unfinished character), stop scanner (text that could become a stop string), splitter (a
marker of a tool call). The concatenated deltas are the same for every way the tokens arrive.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from services.gateway.generation.plan import Output
from services.gateway.generation.scores import Score, TopScore, unpack_scores
from services.gateway.generation.splitting import CallPiece, Splitter
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_scanner import StopScanner
from services.gateway.text.vocabulary import Vocabulary
from shared.messages.generation import Emission, FinishReason
from shared.messages.packing import pack_int32, unpack_int32
from shared.messages.sampling import Logprobs


class ChoiceSpec(msgspec.Struct, frozen=True, kw_only=True):
    stops: tuple[str, ...] = ()
    min_new_tokens: int = 0
    """No stop string completes before the token of this number."""
    output: Output = Output()


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What became certain since the delta before; at least one field is set."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    scores: Sequence[Score] = ()
    finish: FinishReason | None = None


class SendFinish(NamedTuple):
    """Tell the scheduler: a stop string completed with token number `num_tokens`."""

    num_tokens: int


class SendResync(NamedTuple):
    """Ask the scheduler for everything from generated token `position` on."""

    position: int


Command = SendFinish | SendResync


class Advance(NamedTuple):
    """The outcome of one emission, of which `num_tokens` tokens were new."""

    delta: Delta | None = None
    command: Command | None = None
    num_tokens: int = 0


_NOTHING = Advance()
_ScoreRow = tuple[float, list[TopScore]]


class ChoiceCore:
    """State of one choice.

    token_ids      every generated token received, without gaps, the end token included
    num_tokens     those that count: all, or those up to the token that completed a stop string
    finish         why it ended; None while it runs
    matched        the stop string or stop token id that ended it
    error          why, when `finish` is ERROR
    cached_tokens  as the scheduler said when the request was first admitted; None before the first emission
    """

    def __init__(self, spec: ChoiceSpec, vocabulary: Vocabulary) -> None:
        self.token_ids: list[int] = []
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self.matched: str | int | None = None
        self.error: str | None = None
        self.cached_tokens: int | None = None
        self.prompt_logprobs: Logprobs | None = None
        self._spec = spec
        self._splitter = Splitter(spec.output, vocabulary)
        self._detokenizer = Detokenizer(vocabulary, spec.output.skip_special_tokens, keep=self._splitter.marker_ids)
        self._scanner = StopScanner(spec.stops)
        self._asked_position: int | None = None
        """A resync from here on is under way."""
        self._scores: deque[tuple[Score, int]] = deque()
        """Not yet shown, with the end of their text."""
        self._num_detokenized = 0
        self._num_released = 0
        """Characters out of the detokenizer and out of the scanner: the text between is held back."""

    @property
    def num_received(self) -> int:
        """The position that the next emission should have."""
        return len(self.token_ids)

    def resume(self) -> bytes:
        """The tokens so far, packed, for a Submit to another replica."""
        self._asked_position = None
        return pack_int32(self.token_ids)

    def receive(self, emission: Emission) -> Advance:
        """Take in one emission: new, repeated, overlapping or too early."""
        if self.finish is not None:
            return _NOTHING
        num_known = len(self.token_ids)
        if emission.position > num_known:
            if self._asked_position == num_known:
                return _NOTHING
            self._asked_position = num_known
            return Advance(command=SendResync(num_known))
        ids = unpack_int32(emission.token_ids)
        num_seen = num_known - emission.position
        if len(ids) < num_seen:  # a repetition of something older
            return _NOTHING
        if self.cached_tokens is None:
            self.cached_tokens = emission.cached_tokens
        if self.prompt_logprobs is None:
            self.prompt_logprobs = emission.prompt_logprobs
        fresh = ids[num_seen:]
        if not fresh and emission.finish is None:
            return _NOTHING
        self._asked_position = None
        rows: list[_ScoreRow] = unpack_scores(emission.logprobs)[num_seen:] if emission.logprobs is not None else []
        self.token_ids += fresh
        self.num_tokens = len(self.token_ids)
        text = self._text_of(fresh, rows, emission)
        if self.finish is not None:  # a stop string
            command = SendFinish(self.num_tokens) if emission.finish is None else None
            return Advance(self._delta(text), command, len(fresh))
        if emission.finish is not None:
            text += self._end(emission)
        return Advance(self._delta(text), None, len(fresh))

    def _text_of(self, fresh: Sequence[int], rows: Sequence[_ScoreRow], emission: Emission) -> str:
        """The text that new tokens release, up to a stop string. An end token is counted and never shown."""
        shown = fresh[:-1] if emission.stop_token is not None else fresh
        if not self._spec.stops and not rows:
            text = self._detokenizer.push(shown)
            self._num_detokenized += len(text)
            return text
        first = len(self.token_ids) - len(fresh)
        released = ""
        for i, token_id in enumerate(shown):
            piece, offset = self._detokenizer.push((token_id,)), self._num_detokenized
            self._num_detokenized += len(piece)
            if rows:
                self._scores.append((Score(token_id, *rows[i], offset), self._num_detokenized))
            released += self._scan(piece, first + i + 1)
            if self.finish is not None:
                break
        return released

    def _scan(self, text: str, num_tokens: int) -> str:
        """Look for stop strings in the text that token number `num_tokens` completed."""
        scan = self._scanner.push(text, armed=num_tokens >= self._spec.min_new_tokens)
        if scan.matched is not None:
            self.finish, self.matched, self.num_tokens = FinishReason.STOP, scan.matched, num_tokens
        return scan.text

    def _end(self, emission: Emission) -> str:
        """The generation is over: release what is held, unless the text will never be complete."""
        if emission.finish in (FinishReason.ABORT, FinishReason.ERROR):
            self.finish, self.error = emission.finish, emission.error
            return ""
        rest = self._detokenizer.finish()
        self._num_detokenized += len(rest)
        released = self._scan(rest, self.num_tokens)
        if self.finish is None:
            released += self._scanner.finish()
            self.finish, self.matched = emission.finish, emission.stop_token
        return released

    def _delta(self, text: str) -> Delta | None:
        self._num_released += len(text)
        split = self._splitter.push(text) if self.finish is None else self._splitter.finish(text)
        scores = self._release_scores() if text or self.finish is not None else []
        if not (text or scores or split.reasoning or split.calls or split.text or self.finish is not None):
            return None
        return Delta(text=split.text, reasoning=split.reasoning, calls=split.calls, scores=scores, finish=self.finish)

    def _release_scores(self) -> list[Score]:
        """Scores of tokens whose text is out; at a stop string, those of tokens that lie behind it are dropped."""
        released = []
        while self._scores and self._scores[0][1] <= self._num_released:
            score, _end = self._scores.popleft()
            # An empty token right at the end may be the first half of the stop's own first character.
            if not (isinstance(self.matched, str) and score.offset >= self._num_released):
                released.append(score)
        if self.finish is not None:
            # The token that the end of the text cuts through still belongs to it.
            released += [score for score, _ in self._scores if score.offset < self._num_released]
            self._scores.clear()
        return released
