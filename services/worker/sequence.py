"""What the worker knows about one sequence: tokens, where their KV lies, how the next is chosen, when it ends."""

import numpy as np
from numpy.typing import NDArray

from services.worker.matching.matcher import Matcher
from services.worker.sampling.controls import SamplingControls
from shared.messages.execution import NewSequence, RowEnd
from shared.messages.sampling import SamplingParams

Extent = tuple[int, int]
"""(start, length): a run of neighbouring KV slots"""


class BadSequence(ValueError):
    """What the scheduler said about a sequence contradicts itself or the model's limits."""


class SequenceState:
    """One sequence from its admission to its release.

    tokens        int32 [capacity]  prompt, then generated tokens; `num_tokens` of them are set
    num_computed  positions below it have their KV in the pool; never more than `num_tokens`
    extents       slots in order of position; `num_slots` of them in all
    end           RUNNING until the sequence ends; then no further row of it is computed
    failure       why it is FAILED, until a result has said so
    matcher       the state of its grammar, of a constrained sequence

    Between two steps of a decoding sequence the last token alone has no KV: `num_computed == num_tokens - 1`.
    """

    __slots__ = (
        "controls",
        "end",
        "extents",
        "failure",
        "handle",
        "matcher",
        "max_tokens",
        "num_computed",
        "num_slots",
        "num_tokens",
        "prompt_len",
        "tokens",
    )

    def __init__(self, new: NewSequence, context_len: int, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        """Raises BadSequence."""
        given = np.frombuffer(new.token_ids, "<i4")
        self.handle = new.handle
        self.prompt_len = new.prompt_len
        self.num_tokens = len(given)
        self.num_computed = new.prefix_len
        self.end = RowEnd.RUNNING
        self.failure = ""
        self.matcher: Matcher | None = None
        self.extents: list[Extent] = []
        self.num_slots = 0
        self.max_tokens = min(new.prompt_len + new.max_new_tokens, context_len)
        if not 0 < new.prompt_len <= len(given):
            raise BadSequence(f"prompt_len is {new.prompt_len} of {len(given)} tokens")
        if len(given) > context_len:
            raise BadSequence(f"the sequence has {len(given)} tokens, the model takes {context_len}")
        if not 0 <= new.prefix_len < len(given):
            raise BadSequence(f"prefix_len is {new.prefix_len} of {len(given)} tokens; the last one is always computed")
        if not (int(given.min()) >= 0 and int(given.max()) < vocab_size):
            raise BadSequence(f"token ids go from {given.min()} to {given.max()}, the vocabulary has {vocab_size}")
        if outside := [token for token, _ in new.sampling.logit_bias if not 0 <= token < vocab_size]:
            raise BadSequence(f"logit_bias names token {outside[0]}, the vocabulary has {vocab_size}")
        self.tokens = np.empty(max(self.max_tokens, len(given)), np.int32)
        self.tokens[: len(given)] = given
        self.controls = SamplingControls(
            new.sampling, given[: new.prompt_len], given[new.prompt_len :], end_token_ids, vocab_size
        )

    @property
    def sampling(self) -> SamplingParams:
        return self.controls.params

    @property
    def generated(self) -> NDArray[np.int32]:
        return self.tokens[self.prompt_len : self.num_tokens]

    @property
    def is_full(self) -> bool:
        """The length limit is reached: nothing more is sampled."""
        return self.num_tokens >= self.max_tokens

    def replace_extents(self, start: int, extents: list[Extent], num_slots_in_pool: int) -> None:
        """The slots of positions below `start` stay, the rest becomes `extents`. Raises BadSequence."""
        if not 0 <= start <= self.num_slots:
            raise BadSequence(f"extents from position {start}, but {self.num_slots} slots are held")
        for first, length in extents:
            if not (length > 0 and first >= 0 and first + length <= num_slots_in_pool):
                raise BadSequence(f"extent ({first}, {length}) lies outside the pool of {num_slots_in_pool} slots")
        while self.num_slots > start:
            first, length = self.extents.pop()
            self.num_slots -= length
            if self.num_slots < start:
                kept = start - self.num_slots
                self.extents.append((first, kept))
                self.num_slots += kept
        for extent in extents:
            self._append_extent(extent)
        if self.num_slots < self.num_computed:
            raise BadSequence(f"{self.num_slots} slots for {self.num_computed} computed tokens")

    def _append_extent(self, extent: Extent) -> None:
        """Neighbouring runs become one: the fewer extents, the less work in attention."""
        first, length = extent
        self.num_slots += length
        if self.extents:
            last_first, last_length = self.extents[-1]
            if last_first + last_length == first:
                self.extents[-1] = (last_first, last_length + length)
                return
        self.extents.append(extent)

    def accept(self, token: int) -> None:
        """Append a chosen token, and end the sequence where the token or the length limit says so."""
        assert self.end is RowEnd.RUNNING, f"sequence {self.handle} has ended"
        assert not self.is_full, f"sequence {self.handle} is full"
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.controls.accept(token)
        if token in self.controls.stop_ids:
            self.end = RowEnd.STOP
        elif self.is_full:
            self.end = RowEnd.LENGTH

    def close(self, end_token: int) -> None:
        """End with `end_token`, which nobody has sampled."""
        self.accept(end_token)
        self.end = RowEnd.STOP

    def fail(self, message: str) -> None:
        self.end = RowEnd.FAILED
        self.failure = message

    def take_failure(self) -> str:
        """The failure, to be reported once."""
        failure, self.failure = self.failure, ""
        return failure

    def check_invariants(self) -> None:
        assert 0 < self.prompt_len <= self.num_tokens <= len(self.tokens)
        assert self.num_computed <= self.num_tokens
        assert self.num_slots == sum(length for _, length in self.extents)
        assert self.num_computed <= self.num_slots or self.end is RowEnd.FAILED
