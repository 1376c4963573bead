"""The thread that runs steps, in order, one at a time, so that the event loop is never blocked by a forward pass.

Steps come decoded and results leave unencoded: between two steps this thread does nothing that the other one could do.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from services.worker.engine import Engine
from services.worker.events import Crashed, Opened, Report, Reset, StepRefused
from shared.messages.execution import Step, StepResult

MAX_QUEUED = 8
"""Steps that may wait. A window of two needs as many, and a reset in between."""


class Executor:
    """Owns the engine, which lives in its thread alone, loading included (its compute threads then stay warm)."""

    def __init__(self, open_engine: Callable[[], Engine], report: Callable[[Report], None]) -> None:
        """`report` is called in the executor's thread, for each step in order."""
        self._open_engine = open_engine
        self._report = report
        self._queue: queue.Queue[Step | Reset | None] = queue.Queue(MAX_QUEUED)
        # A daemon: a process that must end does not wait for a forward pass that hangs.
        self._thread = threading.Thread(target=self._live, name="executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Step | Reset) -> bool:
        """Queue work; False when the queue is full."""
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            return False
        return True

    def stop(self) -> None:
        """Let the thread end after the step it runs; what waits is dropped."""
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except queue.Full:
                self._queue.get_nowait()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _live(self) -> None:
        try:
            with contextlib.closing(self._open_engine()) as engine:
                self._report(Opened(engine.limits))
                self._run_steps(engine)
        except Exception as error:
            self._report(Crashed(error))

    def _run_steps(self, engine: Engine) -> None:
        refusing = False
        while True:
            idle_since = time.perf_counter()
            work = self._queue.get()
            started = time.perf_counter()
            match work:
                case None:
                    return
                case Reset():
                    engine.reset()
                    refusing = False
                case Step() if not refusing:
                    outcome = engine.run(work)
                    if isinstance(outcome, StepResult):
                        outcome = msgspec.structs.replace(
                            outcome,
                            wait_us=int((started - idle_since) * 1e6),
                            run_us=int((time.perf_counter() - started) * 1e6),
                        )
                    refusing = isinstance(outcome, StepRefused)
                    self._report(outcome)
