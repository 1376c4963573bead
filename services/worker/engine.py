"""One step from its deltas to its result: core and runner together."""

from services.worker.core import BadStep, WorkerCore
from services.worker.events import StepRefused
from services.worker.matching.matchers import Matchers
from services.worker.runner import ForwardFailed, ModelLimits, Runner, Sampled
from shared.messages.execution import Step, StepResult


class Engine:
    """Everything that computes. Not thread-safe: it belongs to the executor."""

    def __init__(self, runner: Runner, matchers: Matchers) -> None:
        self.limits: ModelLimits = runner.limits
        self._runner = runner
        self._matchers = matchers
        self._core = WorkerCore(runner.limits, matchers)

    def run(self, step: Step) -> StepResult | StepRefused:
        """Raises whatever leaves the state of the worker unknown."""
        try:
            plan = self._core.plan(step)
        except BadStep as error:
            return StepRefused(step.epoch, step.seq, str(error))
        try:
            sampled = self._runner.run(plan) if plan.rows else Sampled({})
        except ForwardFailed as error:
            return self._core.fail(str(error))
        return self._core.commit(sampled)

    def reset(self) -> None:
        """A new epoch: forget all sequences."""
        self._core.reset()

    def close(self) -> None:
        """End the threads that compile grammars and fill masks."""
        self._matchers.close()
