"""The worker's state machine: deltas in, rows out to the runner, tokens back in, a StepResult out.

It owns every sequence of the current epoch. For each step `plan` applies what has changed and lays out the rows, then
`commit` (or `fail`) takes in what became of them; the two alternate. No tensors, no clock, no I/O.
"""

from dataclasses import dataclass, field

from services.worker.runner import ModelLimits, RowPlan, Sampled, StepPlan, TokenScores
from services.worker.sequence import BadSequence, Extent, SequenceState
from shared.messages.execution import RowEnd, Step, StepResult
from shared.messages.packing import INT32_BYTES, pack_int32, unpack_int32
from shared.messages.sampling import Logprobs


class BadStep(ValueError):
    """The step does not fit what the worker knows: scheduler and worker have lost each other, the epoch is over."""


@dataclass(slots=True)
class _OpenStep:
    """A step between `plan` and `commit`."""

    step: Step
    plan: StepPlan
    outcomes: list["_Outcome"] = field(default_factory=list)
    """One for each row of the step, in its order."""


@dataclass(slots=True)
class _Outcome:
    """What becomes of one row of a step."""

    handle: int
    row: RowPlan | None
    """None: nothing is computed."""
    end: RowEnd = RowEnd.RUNNING
    failure: str = ""
    token_ids: tuple[int, ...] = ()


class WorkerCore:
    def __init__(self, limits: ModelLimits) -> None:
        self.limits = limits
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
        for handle, extend_len in _rows(step):
            outcome = self._plan_row(handle, extend_len)
            self._open.outcomes.append(outcome)
            if outcome.row is not None:
                self._open.plan.rows.append(outcome.row)
        return self._open.plan

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
            else:
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

    def _plan_row(self, handle: int, extend_len: int | None) -> _Outcome:
        """`extend_len` is None for a decode row."""
        sequence = self._sequences.get(handle)
        if sequence is None:
            if (refusal := self._refused.get(handle)) is None:
                raise BadStep(f"a row names handle {handle}, which is unknown")
            self._refused[handle] = ""
            return _failed(handle, refusal) if refusal else _Outcome(handle, None, RowEnd.DROPPED)
        if sequence.failure:
            return self._report_failure(sequence)
        if sequence.end is not RowEnd.RUNNING:
            return _Outcome(handle, None, RowEnd.DROPPED)
        start = sequence.num_computed
        num_left = sequence.num_tokens - start
        length = 1 if extend_len is None else extend_len
        if extend_len is None and num_left != 1:
            sequence.fail(f"a decode row, but {num_left} tokens are not computed yet")
        elif not 0 < length <= num_left:
            sequence.fail(f"a row of {length} tokens, but {num_left} are not computed yet")
        elif start + length > sequence.num_slots:
            sequence.fail(f"a row up to token {start + length}, but there are slots for {sequence.num_slots}")
        if sequence.failure:
            return self._report_failure(sequence)
        return _Outcome(handle, _row_plan(sequence, start, start + length))

    @staticmethod
    def _report_failure(sequence: SequenceState) -> _Outcome:
        outcome = _failed(sequence.handle, sequence.failure)
        sequence.failure = ""
        return outcome

    # ---------------------------------------------------------------- commit

    def commit(self, sampled: Sampled) -> StepResult:
        """Take in what the runner computed for the last plan."""
        step = self._close()
        tokens = iter(sampled.token_ids)
        for index, outcome in enumerate(outcome for outcome in step.outcomes if outcome.row is not None):
            row = outcome.row
            assert row is not None
            sequence = row.sequence
            token = next(tokens) if row.samples else None
            sequence.num_computed = row.end
            if failure := sampled.failures.get(index):
                sequence.fail(failure)
                outcome.failure, sequence.failure = failure, ""
            elif token is not None:
                sequence.accept(token)
                outcome.token_ids = (token,)
            elif row.end == sequence.num_tokens:
                assert sequence.is_full, "a row that reaches the end samples unless nothing may be sampled"
                sequence.end = RowEnd.LENGTH
            outcome.end = sequence.end
        return self._result(step, sampled)

    def fail(self, message: str) -> StepResult:
        """The last plan could not be run: each of its rows is FAILED."""
        step = self._close()
        for outcome in step.outcomes:
            if outcome.row is not None:
                sequence = outcome.row.sequence
                sequence.fail(message)
                outcome.end, outcome.failure, sequence.failure = RowEnd.FAILED, message, ""
        return self._result(step, Sampled(token_ids=()))

    def _close(self) -> _OpenStep:
        assert self._open is not None, "no step is planned"
        step, self._open = self._open, None
        return step

    def _result(self, open_step: _OpenStep, sampled: Sampled) -> StepResult:
        logprobs: dict[int, Logprobs] = {}
        prompt_logprobs: dict[int, Logprobs] = {}
        for index, scores in sampled.scores.items():
            row = open_step.plan.rows[index]
            if row.sequence.end is not RowEnd.FAILED:
                _split_scores(row, scores, logprobs, prompt_logprobs)
        outcomes = open_step.outcomes
        return StepResult(
            epoch=open_step.step.epoch,
            seq=open_step.step.seq,
            counts=pack_int32(len(outcome.token_ids) for outcome in outcomes),
            token_ids=pack_int32(token for outcome in outcomes for token in outcome.token_ids),
            ends=bytes(outcome.end for outcome in outcomes),
            failures=tuple((outcome.handle, outcome.failure) for outcome in outcomes if outcome.failure),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

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


def _row_plan(sequence: SequenceState, start: int, end: int) -> RowPlan:
    """The row that computes positions `start` to `end`, with the logits that sampling and logprobs need."""
    sampling = sequence.sampling
    samples = end == sequence.num_tokens and not sequence.is_full
    num_logits = int(samples)
    scores = samples and sampling.num_logprobs is not None
    if sampling.prompt_logprobs_start is not None:
        # A token's logprob comes from the logits one position before it. Those of the last prompt token speak about an
        # output token; further positions exist when a resumed sequence computes its generated tokens again.
        first = max(start, sampling.prompt_logprobs_start - 1)
        if first < min(end, sequence.prompt_len - 1):
            num_logits = end - first
            scores = True
    return RowPlan(sequence, start, end, num_logits, samples, scores)


def _split_scores(
    row: RowPlan, scores: TokenScores, logprobs: dict[int, Logprobs], prompt_logprobs: dict[int, Logprobs]
) -> None:
    """Sort a row's scores into those of prompt tokens and those of tokens that are new in this step."""
    sequence = row.sequence
    first = row.end - row.num_logits + 1
    in_prompt = min(max(0, sequence.prompt_len - first), len(scores.chosen))
    if in_prompt:
        prompt_logprobs[sequence.handle] = _pack_scores(scores, 0, in_prompt)
    if row.samples and sequence.sampling.num_logprobs is not None:
        logprobs[sequence.handle] = _pack_scores(scores, len(scores.chosen) - 1, len(scores.chosen))


def _pack_scores(scores: TokenScores, start: int, stop: int) -> Logprobs:
    return Logprobs(
        num_top=scores.top.shape[1],
        chosen=scores.chosen[start:stop].astype("<f4").tobytes(),
        top_ids=scores.top_ids[start:stop].astype("<i4").tobytes(),
        top=scores.top[start:stop].astype("<f4").tobytes(),
    )


def _extents(packed: bytes) -> list[Extent]:
    numbers = _unpack(packed, "extents", width=2)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _unpack(packed: bytes, name: str, width: int = 1) -> list[int]:
    if len(packed) % (width * INT32_BYTES):
        raise BadStep(f"{name} has {len(packed)} bytes, not a multiple of {width * INT32_BYTES}")
    return unpack_int32(packed)


def _failed(handle: int, message: str) -> _Outcome:
    return _Outcome(handle, None, RowEnd.FAILED, message)
