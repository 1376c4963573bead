"""The steps that are under way: at most `size`, numbered without gaps, answered in order."""

from collections import deque
from dataclasses import dataclass

from services.scheduler.planner import PlannedStep
from shared.messages.execution import StepResult


@dataclass(slots=True)
class StepInFlight:
    seq: int
    planned: PlannedStep
    sent_ms: int


class StepWindow:
    """Order, numbering and deadlines of unanswered steps. Size 1 turns pipelining off."""

    DEADLINE_FACTOR = 8
    SMOOTHING = 0.1

    def __init__(self, size: int, min_deadline_ms: int) -> None:
        assert size >= 1
        self.size = size
        self._min_deadline_ms = min_deadline_ms
        self._steps: deque[StepInFlight] = deque()
        self._next_seq = 1
        self._us_per_token = 0.0
        self._us_per_step = 0.0
        self.last_seq = 0
        """Of the last result taken in this epoch."""
        self.num_steps = 0
        """Sent since the start, over all epochs."""
        self.executor_wait_us = 0
        """Since the start: how long the worker's executor had nothing to run."""
        self.executor_run_us = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self.size

    def restart(self) -> None:
        """A new epoch: steps are numbered from 1 again, nothing is under way."""
        self._steps.clear()
        self._next_seq = 1
        self.last_seq = 0

    def send(self, planned: PlannedStep, now_ms: int) -> int:
        """Returns the step's number."""
        assert not self.is_full
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self.num_steps += 1
        self._steps.append(StepInFlight(seq, planned, now_ms))
        return seq

    def take(self, result: StepResult, now_ms: int) -> PlannedStep | None:
        """The step that `result` answers; None if it was answered before or an earlier result is missing."""
        if not self._steps or result.seq != self._steps[0].seq:
            return None
        step = self._steps.popleft()
        self.last_seq = result.seq
        self.executor_wait_us += result.wait_us
        self.executor_run_us += result.run_us
        if self._steps:
            # The worker turns to the next step only now.
            self._steps[0].sent_ms = max(self._steps[0].sent_ms, now_ms)
        self._us_per_step += self.SMOOTHING * (result.run_us - self._us_per_step)
        self._us_per_token += self.SMOOTHING * (result.run_us / step.planned.num_tokens - self._us_per_token)
        return step.planned

    def missed(self, result: StepResult) -> int | None:
        """The number of the oldest unanswered step, if `result` came before its result did."""
        return self._steps[0].seq if self._steps and result.seq > self._steps[0].seq else None

    def postpone(self, now_ms: int) -> int | None:
        """Start all deadlines anew; returns the number of the oldest unanswered step, if there is one."""
        for step in self._steps:
            step.sent_ms = now_ms
        return self._steps[0].seq if self._steps else None

    def overdue(self, now_ms: int) -> tuple[int, int] | None:
        """(number of the oldest step, how many deadlines have passed), or None. A large step is given more time."""
        if not self._steps:
            return None
        step = self._steps[0]
        expected_us = max(self._us_per_step, self._us_per_token * step.planned.num_tokens)
        deadline_ms = max(self._min_deadline_ms, int(self.DEADLINE_FACTOR * expected_us / 1000))
        num_passed = (now_ms - step.sent_ms) // deadline_ms
        return (step.seq, num_passed) if num_passed else None
