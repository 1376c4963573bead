"""The worker's state machine: deltas in, rows out to the runner, tokens back in, a StepResult out.

It owns every sequence of the current epoch. For each step `plan` applies what has changed and lays out the rows, then
`commit` (or `fail`) takes in what became of them; the two alternate. No tensors, no clock, no I/O; the one thing that it may
see sooner or later is whether a grammar is compiled and a mask filled, which moves a token to a later step and changes none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.worker.jump_forward import MAX_JUMPED_TOKENS, draft, ends_by_itself, take_ending, take_forced
from services.worker.matching.matchers import Matchers, StepMasks
from services.worker.result import Outcome, make_result
from services.worker.runner import ModelLimits, RowPlan, Sampled, StepPlan
from services.worker.sequence import BadSequence, Extent, SequenceState
from shared.messages.execution import RowEnd, Step, StepResult
from shared.messages.packing import INT32_BYTES, unpack_int32


class BadStep(ValueError):
    """The step does not fit what the worker knows: scheduler and worker have lost each other, the epoch is over."""


@dataclass(slots=True)
class _OpenStep:
    """A step between `plan` and `commit`."""

    step: Step
    plan: StepPlan
    outcomes: list[Outcome] = field(default_factory=list)
    """One for each row of the step, in its order."""
    num_jumps_left: int = MAX_JUMPED_TOKENS


class WorkerCore:
    def __init__(self, limits: ModelLimits, matchers: Matchers) -> None:
        self.limits = limits
        self._matchers = matchers
        self._sequences: dict[int, SequenceState] = {}
        self._refused: dict[int, str] = {}
        """Handles admitted with a description that makes no sense, and why; like sequences that failed at once."""
        self._open: _OpenStep | None = None

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def sequence(self, handle: int) -> SequenceState:
        return self._sequences[handle]

    def reset(self) -> None:
        """A new epoch: nothing of the last one remains, its open step included."""
        self._sequences.clear()
        self._refused.clear()
        self._open = None

    # ---------------------------------------------------------------- plan

    def plan(self, step: Step) -> StepPlan:
        """Apply `release`, `admit` and `update`, then lay out the rows that compute something. Raises BadStep."""
        assert self._open is None, "the last step has not been committed"
        for handle in _unpack(step.release, "release"):
            if self._sequences.pop(handle, None) is None and self._refused.pop(handle, None) is None:
                raise BadStep(f"release names handle {handle}, which is unknown")
        self._admit(step)
        self._update(step)
        self._open = _OpenStep(step, StepPlan([]))
        plan = self._open.plan
        for handle, extend_len in _rows(step):
            outcome = self._plan_row(handle, extend_len)
            self._open.outcomes.append(outcome)
            if outcome.row is not None:
                plan.rows.append(outcome.row)
        plan.masks = self._masks(plan.rows)
        return plan

    def _masks(self, rows: Sequence[RowPlan]) -> StepMasks | None:
        constrained, ahead = [], []
        for row in rows:
            if row.samples and (matcher := row.sequence.matcher) is not None:
                constrained.append(matcher)
                # A greedy row needs its mask only where the model's first choice is not allowed.
                if matcher.expects_masks or not row.sequence.controls.greedy:
                    ahead.append(matcher)
        return self._matchers.masks(constrained, ahead) if constrained else None

    def _admit(self, step: Step) -> None:
        limits = self.limits
        for new in step.admit:
            if new.handle in self._sequences or new.handle in self._refused:
                raise BadStep(f"handle {new.handle} is admitted twice")
            try:
                sequence = SequenceState(new, limits.context_len, limits.vocab_size, limits.end_token_ids)
                sequence.replace_extents(0, _extents(new.extents), limits.num_slots)
            except BadSequence as error:
                self._refused[new.handle] = str(error)
                continue
            if new.grammar is not None:
                sequence.matcher = self._matchers.open(new.grammar, sequence.generated.tolist())
            self._sequences[new.handle] = sequence

    def _update(self, step: Step) -> None:
        for update in step.update:
            sequence = self._sequences.get(update.handle)
            if sequence is None:
                if update.handle in self._refused:
                    continue
                raise BadStep(f"update names handle {update.handle}, which is unknown")
            try:
                sequence.replace_extents(update.start, _extents(update.extents), self.limits.num_slots)
            except BadSequence as error:
                sequence.fail(str(error))

    def _plan_row(self, handle: int, extend_len: int | None) -> Outcome:
        """`extend_len` is None for a decode row."""
        assert self._open is not None
        sequence = self._sequences.get(handle)
        if sequence is None:
            if (refusal := self._refused.get(handle)) is None:
                raise BadStep(f"a row names handle {handle}, which is unknown")
            self._refused[handle] = ""
            return Outcome(handle, RowEnd.FAILED, refusal) if refusal else Outcome(handle, RowEnd.DROPPED)
        if sequence.end is RowEnd.RUNNING:
            self._check_row(sequence, extend_len)
        if sequence.failure:
            return Outcome(handle, RowEnd.FAILED, sequence.take_failure())
        if sequence.end is not RowEnd.RUNNING:
            return Outcome(handle, RowEnd.DROPPED)
        start = sequence.num_computed
        end = start + (1 if extend_len is None else extend_len)
        num_forced = 0
        if end == sequence.num_tokens and sequence.matcher is not None:
            num_forced = take_forced(sequence, sequence.matcher, self._open.num_jumps_left)
            self._open.num_jumps_left -= num_forced
            end += num_forced
        return Outcome(handle, row=self._row(sequence, start, end, num_forced))

    @staticmethod
    def _check_row(sequence: SequenceState, extend_len: int | None) -> None:
        """Fail the sequence if this row cannot be computed."""
        num_left = sequence.num_tokens - sequence.num_computed
        length = 1 if extend_len is None else extend_len
        end = sequence.num_computed + length
        matcher = sequence.matcher
        if extend_len is None and num_left != 1:
            sequence.fail(f"a decode row, but {num_left} tokens are not computed yet")
        elif not 0 < length <= num_left:
            sequence.fail(f"a row of {length} tokens, but {num_left} are not computed yet")
        elif end > sequence.num_slots:
            sequence.fail(f"a row up to token {end}, but there are slots for {sequence.num_slots}")
        elif matcher is not None and matcher.prepare() and matcher.failure:
            sequence.fail(matcher.failure)

    def _row(self, sequence: SequenceState, start: int, end: int, num_forced: int) -> RowPlan:
        """The row that computes positions `start` to `end`, with the logits that sampling and logprobs need."""
        assert self._open is not None
        sampling = sequence.sampling
        reaches_end = end == sequence.num_tokens and sequence.end is RowEnd.RUNNING and not sequence.is_full
        samples = reaches_end and not ends_by_itself(sequence)
        num_logits = int(samples)
        scores = (samples or num_forced > 0) and sampling.num_logprobs is not None
        if scores:
            # The first forced token is the one after the last token that was there before.
            num_logits = 1 + num_forced
        if sampling.prompt_logprobs_start is not None:
            # A token's logprob comes from the logits one position before it. Those of the last prompt token speak about
            # an output token; more positions exist when a resumed sequence computes its generated tokens again.
            first = max(start, sampling.prompt_logprobs_start - 1)
            if first < min(end, sequence.prompt_len - 1):
                num_logits = end - first
                scores = True
        drafted = draft(sequence, self._open.num_jumps_left) if samples and not scores else []
        self._open.num_jumps_left -= len(drafted)
        return RowPlan(sequence, start, end, num_logits + len(drafted), samples, scores, num_forced, drafted)

    # ---------------------------------------------------------------- commit

    def commit(self, sampled: Sampled) -> StepResult:
        """Take in what the runner computed for the last plan."""
        open_step = self._close()
        computed = [outcome for outcome in open_step.outcomes if outcome.row is not None]
        for index, outcome in enumerate(computed):
            row = outcome.row
            assert row is not None
            sequence = row.sequence
            num_before = sequence.num_tokens - row.num_forced
            sequence.num_computed = row.end
            if failure := sampled.failures.get(index):
                sequence.fail(failure)
            elif not row.samples:
                self._commit_without_sample(row)
            elif index in sampled.token_ids:
                self._accept_sampled(row, sampled.token_ids[index])
            else:
                assert sequence.matcher is not None, "only for want of a mask a row that samples gets no token"
                # The next row computes the last token once more, for its logits.
                sequence.num_computed -= 1
            outcome.end, outcome.failure = sequence.end, sequence.take_failure()
            if sequence.end is not RowEnd.FAILED:
                outcome.token_ids = tuple(sequence.tokens[num_before : sequence.num_tokens].tolist())
            if sequence.end in (RowEnd.STOP, RowEnd.LENGTH):
                outcome.num_without_kv = max(0, sequence.num_tokens - 1 - sequence.num_computed)
        return make_result(open_step.step, open_step.outcomes, sampled.scores)

    def fail(self, message: str) -> StepResult:
        """The last plan could not be run: each of its rows is FAILED."""
        open_step = self._close()
        for outcome in open_step.outcomes:
            if outcome.row is not None:
                outcome.row.sequence.fail(message)
                outcome.end, outcome.failure = RowEnd.FAILED, outcome.row.sequence.take_failure()
        return make_result(open_step.step, open_step.outcomes, {})

    def _close(self) -> _OpenStep:
        assert self._open is not None, "no step is planned"
        step, self._open = self._open, None
        return step

    def _commit_without_sample(self, row: RowPlan) -> None:
        sequence = row.sequence
        if row.end < sequence.num_tokens or sequence.end is not RowEnd.RUNNING:
            return  # a chunk of the prompt, or a forced token has ended it
        if sequence.is_full:
            sequence.end = RowEnd.LENGTH
        else:
            sequence.close(self.limits.end_token_ids[0])

    def _accept_sampled(self, row: RowPlan, token_ids: Sequence[int]) -> None:
        """Take the sampled tokens as far as the draft was right: what was computed behind a wrong token means nothing."""
        sequence = row.sequence
        for index, token in enumerate(token_ids):
            sequence.num_computed = row.end + index
            self._accept(sequence, token)
            if sequence.end is not RowEnd.RUNNING or token not in row.draft[index : index + 1]:
                return

    def _accept(self, sequence: SequenceState, token: int) -> None:
        """The sequence takes a sampled token, and with it the end of the text where nothing else can follow."""
        sequence.accept(token)
        matcher = sequence.matcher
        if matcher is None or sequence.end is not RowEnd.RUNNING:
            return
        matcher.accept(token)
        if matcher.failure:
            sequence.fail(matcher.failure)
        elif matcher.is_complete:
            if token in self.limits.end_token_ids:  # it was told to ignore them, but there is nothing else
                sequence.end = RowEnd.STOP
            elif ends_by_itself(sequence):
                sequence.close(self.limits.end_token_ids[0])
            else:
                sequence.controls.allow_end()
        else:
            take_ending(sequence, self.limits.end_token_ids[0])

    def check_invariants(self) -> None:
        for sequence in self._sequences.values():
            sequence.check_invariants()


def _rows(step: Step) -> list[tuple[int, int | None]]:
    """(handle, tokens to compute) in the order of the result; None for a decode row. Raises BadStep."""
    rows: list[tuple[int, int | None]] = [(handle, None) for handle in _unpack(step.decode, "decode")]
    extend = _unpack(step.extend, "extend", width=2)
    rows += zip(extend[::2], extend[1::2], strict=True)
    if len({handle for handle, _ in rows}) < len(rows):
        raise BadStep("a handle has more than one row")
    return rows


def _extents(packed: bytes) -> list[Extent]:
    numbers = _unpack(packed, "extents", width=2)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _unpack(packed: bytes, name: str, width: int = 1) -> list[int]:
    if len(packed) % (width * INT32_BYTES):
        raise BadStep(f"{name} has {len(packed)} bytes, not a multiple of {width * INT32_BYTES}")
    return unpack_int32(packed)
