"""What a grammar says before the model is asked: tokens that must come, tokens that will probably come, and endings."""

from services.worker.matching.matcher import Matcher
from services.worker.sequence import SequenceState
from shared.messages.execution import RowEnd

SPARE_SLOTS = 1
"""Slots that forced and drafted tokens leave free: the next step was sent without knowing of them and computes one more."""

MAX_JUMPED_TOKENS = 256
"""Forced and drafted tokens that one step takes, of all its rows: they are computed on top of what the scheduler has planned,
and every other stream waits for them."""


def take_forced(sequence: SequenceState, matcher: Matcher, limit: int) -> int:
    """Append the tokens that the grammar forces, as far as slots and length limit reach, at most `limit`; returns how many."""
    if not matcher.forced or matcher.is_busy:
        return 0
    room = max(0, min(limit, sequence.num_slots - sequence.num_tokens - SPARE_SLOTS))
    num_taken = 0
    for token in matcher.forced[:room]:
        sequence.accept(token)
        num_taken += 1
        if sequence.end is not RowEnd.RUNNING:
            return num_taken
    matcher.accept_forced(num_taken)
    return num_taken


def draft(sequence: SequenceState, limit: int) -> list[int]:
    """Tokens to compute on trial behind the last one, as far as slots and length limit reach, at most `limit`."""
    matcher = sequence.matcher
    if matcher is None or sequence.controls.adjusts:  # penalties would have to count tokens that may be wrong
        return []
    room = min(sequence.num_slots - SPARE_SLOTS, sequence.max_tokens - 1) - sequence.num_tokens
    return matcher.draft[: max(0, min(limit, room))]


def ends_by_itself(sequence: SequenceState) -> bool:
    """Whether the end token needs no logits: nothing else is allowed, and nobody asks how likely it was."""
    matcher = sequence.matcher
    return matcher is not None and matcher.may_jump and matcher.is_complete and sequence.sampling.num_logprobs is None


def take_ending(sequence: SequenceState, end_token: int) -> None:
    """Take the forced tokens behind which the text is complete, and its end, uncomputed: nobody will look at their logits.

    Does nothing where the text can still go on, or where logprobs are wanted.
    """
    matcher = sequence.matcher
    if matcher is None or not matcher.forces_end or sequence.sampling.num_logprobs is not None:
        return
    for token in matcher.forced:
        sequence.accept(token)
        if sequence.end is not RowEnd.RUNNING:
            return
    sequence.close(end_token)
