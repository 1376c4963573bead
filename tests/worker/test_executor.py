import queue

import pytest

from services.worker.engine import Engine
from services.worker.events import Crashed, Opened, Reset, StepRefused
from services.worker.executor import MAX_QUEUED, Executor
from services.worker.matching.matchers import Matchers
from services.worker.runner import ForwardFailed, ModelLimits, Sampled
from shared.messages.execution import RowEnd, StepResult
from tests.support.worker_engine import no_tokenizer
from tests.support.worker_steps import Row, new_sequence, rows, step

LIMITS = ModelLimits(num_slots=1000, context_len=100, vocab_size=100, end_token_ids=(1,))


class ScriptedRunner:
    """Samples 7, or raises what the next item of `script` says; waits for `gate` where one is given."""

    limits = LIMITS

    def __init__(self, script=(), gate=None):
        self.script = list(script)
        self.gate = gate
        self.num_runs = 0

    def run(self, plan):
        if self.gate is not None:
            self.gate.get(timeout=10)
        self.num_runs += 1
        if self.script and (error := self.script.pop(0)) is not None:
            raise error
        return Sampled({index: [7] for index, row in enumerate(plan.rows) if row.samples})


def engine(runner):
    return Engine(runner, Matchers(no_tokenizer, LIMITS.vocab_size))


@pytest.fixture
def start():
    """Starts an executor over a runner; returns it and its reports."""
    executors = []

    def start(open_runner):
        reports = queue.Queue()
        executor = Executor(lambda: engine(open_runner()), reports.put)
        executor.start()
        executors.append(executor)
        return executor, lambda: reports.get(timeout=10)

    yield start
    for executor in executors:
        executor.stop()
        executor.join(timeout_s=10)


def admit(seq, handle=1, epoch=1):
    return step(seq, epoch=epoch, admit=[new_sequence(handle, [5], extents=[(10 * handle, 10)])], extend=[(handle, 1)])


def test_steps_run_in_order_and_say_how_long_they_waited_and_ran(start):
    executor, report = start(ScriptedRunner)
    assert report() == Opened(LIMITS)
    for message in (admit(1), step(2, decode=[1]), step(3, decode=[1])):
        assert executor.submit(message)
    results = [report() for _ in range(3)]
    assert [result.seq for result in results] == [1, 2, 3]
    assert all(rows(result) == [Row([7], RowEnd.RUNNING)] for result in results)
    assert all(result.wait_us >= 0 and result.run_us >= 0 for result in results)


def test_a_step_without_live_rows_does_not_reach_the_runner(start):
    runner = ScriptedRunner()
    executor, report = start(lambda: runner)
    report()
    executor.submit(step(1))
    assert rows(report()) == []
    assert runner.num_runs == 0


def test_a_failed_pass_fails_its_rows_and_the_next_step_runs(start):
    executor, report = start(lambda: ScriptedRunner([ForwardFailed("out of memory")]))
    report()
    executor.submit(admit(1))
    executor.submit(admit(2, handle=2))
    assert report().failures == ((1, "out of memory"),)
    assert rows(report()) == [Row([7], RowEnd.RUNNING)]


def test_after_a_step_that_makes_no_sense_nothing_runs_until_the_reset(start):
    executor, report = start(ScriptedRunner)
    report()
    executor.submit(step(1, decode=[9]))
    executor.submit(admit(2))
    executor.submit(Reset())
    executor.submit(admit(1, epoch=2))
    refused = report()
    assert isinstance(refused, StepRefused)
    assert (refused.seq, refused.reason) == (1, "a row names handle 9, which is unknown")
    result = report()
    assert isinstance(result, StepResult)
    assert (result.epoch, result.seq) == (2, 1)


@pytest.mark.parametrize("error", [AssertionError("our mistake"), RuntimeError("unknown")])
def test_any_other_error_is_a_crash(start, error):
    executor, report = start(lambda: ScriptedRunner([error]))
    report()
    executor.submit(admit(1))
    assert report() == Crashed(error)


def test_an_error_while_opening_is_reported(start):
    def fail():
        raise FileNotFoundError("model.safetensors")

    _, report = start(fail)
    assert isinstance(report().error, FileNotFoundError)


def test_the_queue_is_bounded(start):
    gate = queue.Queue()
    executor, report = start(lambda: ScriptedRunner(gate=gate))
    report()
    taken = 0
    while executor.submit(admit(taken + 1, handle=taken + 1)):
        taken += 1
    assert MAX_QUEUED <= taken <= MAX_QUEUED + 1
    for _ in range(taken):
        gate.put(None)
    assert [report().seq for _ in range(taken)] == list(range(1, taken + 1))
