"""The grammar state of one sequence."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer

MAX_ERROR = 300
"""Characters of llguidance's report that reach the client; the rest is its inner state."""

BITS_PER_WORD = 32

MAX_DRAFT = 3
"""Tokens of a draft. Text that is forced, but not yet in tokens, is hardly ever longer."""

MASKS_AHEAD = 8
"""Tokens for which masks are filled in advance once two in a row have needed them: the model goes against its grammar."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message says why."""


@dataclass(frozen=True, slots=True)
class Prototype:
    """A compiled grammar, to be copied for each sequence, and the tokenizer that its tokens are of."""

    grammar: LLMatcher
    tokenizer: LLTokenizer


class Matcher:
    """Follows the tokens of one sequence and knows what may come next.

    The executor's thread owns it, except while its masks are being filled by another: then `is_busy`.

    masks     int32 [1 + MAX_DRAFT, words]  one bit per token id, lowest first: masks[i] says what may come after the first i
              tokens of `draft`; valid, as far as the draft goes, while `has_masks`
    forced    the only tokens that may come next, as the tokenizer writes their text; empty where there is a choice
    draft     where nothing is forced: the next tokens, if the text that must come is not drawn together with what follows it
    failure   why this sequence cannot go on; then nothing else here means anything
    """

    def __init__(
        self, prototype: Future[Prototype], generated: Sequence[int], num_words: int, jump_forward: bool
    ) -> None:
        self.masks = np.zeros((1 + MAX_DRAFT, num_words), np.int32)
        self.forced: list[int] = []
        self.draft: list[int] = []
        self.failure = ""
        self.may_jump = jump_forward
        """Tokens may be taken without sampling them."""
        self.is_late = False
        """A step has waited for it in vain."""
        self.is_complete = False
        """The text is complete and nothing may follow it, except an end token."""
        self.forces_end = False
        """The text is complete after `forced`, which is not empty, and nothing may follow."""
        self._prototype: Future[Prototype] | None = prototype
        self._generated = list(generated)
        self._grammar: LLMatcher
        self._tokenizer: LLTokenizer
        self._must_come: list[int] = []
        """`forced`, also where it is not to be taken without sampling."""
        self._after_draft: list[LLMatcher] = []
        """The grammar after each token of the draft."""
        self._num_accepted = 0
        self._masks_are_after = -1
        """`_num_accepted` when the masks were filled."""
        self._filling: Future[None] | None = None
        self._filling_after = -1
        """`_num_accepted` when that job was given out."""
        self._refused_after = -2
        """`_num_accepted` at the last refusal."""
        self._masks_ahead = 0

    def prepare(self) -> bool:
        """Whether the matcher can be used; starts it as soon as its grammar is compiled. Waits for nothing."""
        if self._prototype is None:
            return True
        if not self._prototype.done():
            return False
        prototype, self._prototype = self._prototype, None
        try:
            compiled = prototype.result()
        except GrammarError as error:
            self.failure = str(error)
            return True
        self._grammar, self._tokenizer = compiled.grammar.deep_copy(), compiled.tokenizer
        if self._generated:
            self._grammar.consume_tokens(self._generated)
        self._look_ahead()
        return True

    def accept(self, token: int) -> None:
        """The sequence has taken `token`."""
        assert not self.is_busy, "the masks are being filled"
        self._grammar.consume_token(token)
        self._num_accepted += 1
        self._masks_ahead = max(0, self._masks_ahead - 1)
        self._look_ahead(self._must_come[1:] if self._must_come[:1] == [token] else ())

    def accept_forced(self, num_tokens: int) -> None:
        """The sequence has taken the first `num_tokens` of `forced`."""
        assert not self.is_busy, "the masks are being filled"
        taken, rest = self.forced[:num_tokens], self.forced[num_tokens:]
        if not taken:
            return
        self._grammar.consume_tokens(taken)
        self._num_accepted += len(taken)
        self._look_ahead(rest)

    def allows(self, token: int, num_drafted: int = 0) -> bool:
        """Whether `token` may come next, or behind the first `num_drafted` tokens of the draft.

        The same as its bit in the mask, which takes a hundred times longer to fill.
        """
        assert not self.is_busy, "the masks are being filled"
        if self._must_come:
            return token == self._must_come[0]
        grammar = self._after_draft[num_drafted - 1] if num_drafted else self._grammar
        return bool(grammar.validate_tokens([token]) == 1)

    @property
    def pending(self) -> Future[Prototype] | Future[None] | None:
        """What another thread is still doing for this matcher, its grammar or its masks. Raises what went wrong with the masks."""
        if self._prototype is not None:
            return self._prototype
        job = self._filling
        if job is None or self._masks_are_after == self._filling_after:
            return None
        if job.done():
            job.result()
            return None
        return job

    @property
    def is_busy(self) -> bool:
        return self.pending is not None

    def note_refusal(self) -> None:
        """What the model liked best was not allowed."""
        if self._refused_after == self._num_accepted - 1:
            self._masks_ahead = MASKS_AHEAD
        self._refused_after = self._num_accepted

    @property
    def is_ready(self) -> bool:
        """The grammar is compiled and nobody else works with it."""
        return self._prototype is None and not (self.failure or self.is_busy)

    @property
    def expects_masks(self) -> bool:
        """What the model likes best is probably not allowed."""
        return self._masks_ahead > 0

    @property
    def has_masks(self) -> bool:
        return self._masks_are_after == self._num_accepted and not self.failure

    @property
    def wants_masks(self) -> bool:
        """Its masks are out of date and may be filled by whoever asks."""
        return self.prepare() and not (self.failure or self.has_masks or self.is_busy)

    def filled_by(self, job: Future[None]) -> None:
        """`job` is going to call `fill_masks`; until then the matcher must not move."""
        self._filling, self._filling_after = job, self._num_accepted

    def fill_masks(self) -> None:
        """Bring the masks up to date; releases the interpreter meanwhile."""
        if self._must_come:
            self.masks[0] = 0
            word, bit = divmod(self._must_come[0], BITS_PER_WORD)
            self.masks[0].view(np.uint32)[word] = 1 << bit
        else:
            for mask, grammar in zip(self.masks, (self._grammar, *self._after_draft), strict=False):
                grammar.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if grammar.is_error():
                    mask[:] = 0
            self._check()
        self._masks_are_after = self._num_accepted  # last: this is what tells the other thread

    def _look_ahead(self, rest: Sequence[int] = ()) -> None:
        """`rest` was forced before a token was taken, and stays so where the grammar now sees less far."""
        self._must_come, self.forced, self.draft, self._after_draft, self.forces_end = [], [], [], [], False
        self._check()
        if self.failure:
            return
        self.is_complete = self._grammar.is_stopped()
        if self.is_complete:
            return
        self._must_come = self._grammar.compute_ff_tokens() or list(rest)
        if not self.may_jump:
            return
        self.forced = self._must_come
        if self.forced:
            after = self._grammar.deep_copy()
            self.forces_end = after.consume_tokens(self.forced) and after.is_stopped()
        elif text := self._grammar.compute_ff_bytes():
            self._make_draft(text)

    def _check(self) -> None:
        # In an error state llguidance silently allows the end token alone: a truncated text would pass for a complete one.
        if self._grammar.is_error():
            error = self._grammar.get_error().partition("<state>")[0]
            self.failure = f"the constraint cannot be followed: {error.strip()[:MAX_ERROR]}"

    def _make_draft(self, text: bytes) -> None:
        """`text` must come, but its last tokens are open: a longer token may hold them and what follows."""
        after = self._grammar
        for token in self._tokenizer.tokenize_bytes(text)[:MAX_DRAFT]:
            after = after.deep_copy()
            if not after.consume_token(token) or after.is_stopped() or after.compute_ff_tokens():
                return  # nothing to choose behind it: the next step takes what is forced
            self.draft.append(token)
            self._after_draft.append(after)
