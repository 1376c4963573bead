"""A runner without a model: a step takes a given time, and tokens are a function of (seed, position).

For measuring everything around the model. Its distribution puts all probability on one token, which is never an end token, so
a generation ends at its length limit or at a stop id.
"""

import time
from collections.abc import Callable

import numpy as np

from services.worker.runner import ModelLimits, RowPlan, Sampled, StepPlan, TokenScores
from services.worker.sampling.counter_random import uniforms


class SimulatedRunner:
    def __init__(
        self,
        limits: ModelLimits,
        step_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        self._step_s = step_s
        self._clock = clock
        self._sleep = sleep
        self._ids = np.setdiff1d(np.arange(limits.vocab_size, dtype=np.int32), limits.end_token_ids)

    def run(self, plan: StepPlan) -> Sampled:
        started = self._clock()
        rows = [row for row in plan.rows if row.samples]
        numbers = uniforms([row.sequence.controls.seed for row in rows], [row.end for row in rows])
        token_ids = self._ids[(numbers * len(self._ids)).astype(np.int64)]
        sampled = Sampled(token_ids.tolist())
        tokens = iter(sampled.token_ids)
        for index, row in enumerate(plan.rows):
            token = next(tokens) if row.samples else None
            if row.scores:
                sampled.scores[index] = _certain_scores(row, token)
        self._sleep(max(0.0, started + self._step_s - self._clock()))
        return sampled


def _certain_scores(row: RowPlan, token: int | None) -> TokenScores:
    """Logprob 0 for each token, and nothing besides it to list."""
    known = row.known_targets()
    ids = np.append(known, np.int32(token)) if token is not None else known
    num_top = min(1, row.sequence.sampling.num_logprobs or 0)
    return TokenScores(
        chosen=np.zeros(len(ids), np.float32),
        top_ids=ids[:, None][:, :num_top].astype(np.int32),
        top=np.zeros((len(ids), num_top), np.float32),
    )
