"""The grammar state of one sequence."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher

MAX_ERROR = 300
"""Characters of llguidance's report that reach the client; the rest is its inner state."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message says why."""


class Matcher:
    """Follows the tokens of one sequence and knows what may come next.

    The executor's thread owns it, except while its mask is being filled by another: then `is_busy`.

    mask      int32 [words]  one bit per token id that may come next, lowest bit first; valid while `has_mask`
    forced    the only tokens that may come next, as the tokenizer writes their text; empty where there is a choice
    failure   why this sequence cannot go on; then nothing else here means anything
    """

    def __init__(
        self, prototype: Future[LLMatcher], generated: Sequence[int], num_words: int, jump_forward: bool
    ) -> None:
        self.mask = np.zeros(num_words, np.int32)
        self.forced: list[int] = []
        self.failure = ""
        self.is_complete = False
        """The text is complete and nothing may follow it, except an end token."""
        self._prototype: Future[LLMatcher] | None = prototype
        self._generated = list(generated)
        self._jump_forward = jump_forward
        self._grammar: LLMatcher
        self._num_accepted = 0
        self._mask_is_after = -1
        """`_num_accepted` when the mask was filled."""
        self._filling: Future[None] | None = None
        self._filling_after = -1
        """`_num_accepted` when that job was given out."""

    def prepare(self) -> bool:
        """Whether the matcher can be used; starts it as soon as its grammar is compiled. Waits for nothing."""
        if self._prototype is None:
            return True
        if not self._prototype.done():
            return False
        prototype, self._prototype = self._prototype, None
        try:
            self._grammar = prototype.result().deep_copy()
        except GrammarError as error:
            self.failure = str(error)
            return True
        if self._generated:
            self._grammar.consume_tokens(self._generated)
        self._look_ahead()
        return True

    def accept(self, token: int) -> None:
        """The sequence has taken `token`."""
        assert not self.is_busy, "the mask is being filled"
        self._grammar.consume_token(token)
        self._num_accepted += 1
        self._look_ahead()

    def accept_forced(self, num_tokens: int) -> None:
        """The sequence has taken the first `num_tokens` of `forced`."""
        assert not self.is_busy, "the mask is being filled"
        taken, rest = self.forced[:num_tokens], self.forced[num_tokens:]
        if not taken:
            return
        self._grammar.consume_tokens(taken)
        self._num_accepted += len(taken)
        self._look_ahead()
        # What was forced stays forced, also where the tokens before it now allow to see less far.
        self.forced = self.forced or rest

    @property
    def pending(self) -> Future[LLMatcher] | Future[None] | None:
        """What another thread is still doing for this matcher, its grammar or its mask. Raises what went wrong with the mask."""
        if self._prototype is not None:
            return self._prototype
        job = self._filling
        if job is None or self._mask_is_after == self._filling_after:
            return None
        if job.done():
            job.result()
            return None
        return job

    @property
    def is_busy(self) -> bool:
        return self.pending is not None

    @property
    def has_mask(self) -> bool:
        return self._mask_is_after == self._num_accepted

    @property
    def wants_mask(self) -> bool:
        """Its mask is out of date and may be filled by whoever asks."""
        return self.prepare() and not (self.failure or self.has_mask or self.is_busy)

    def filled_by(self, job: Future[None]) -> None:
        """`job` is going to call `fill_mask`; until then the matcher must not move."""
        self._filling, self._filling_after = job, self._num_accepted

    def fill_mask(self) -> None:
        """Bring the mask up to date; releases the interpreter meanwhile."""
        self._grammar.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        self._mask_is_after = self._num_accepted  # last: this is what tells the other thread

    def _look_ahead(self) -> None:
        # In an error state llguidance silently allows the end token alone: a truncated text would pass for a complete one.
        if self._grammar.is_error():
            self.failure = f"the constraint cannot be followed: {self._grammar.get_error().strip()[:MAX_ERROR]}"
            return
        self.is_complete = self._grammar.is_stopped()
        if self._jump_forward and not self.is_complete:
            self.forced = self._grammar.compute_ff_tokens()
        else:
            self.forced = []
