"""A runner without a model: a step takes a given time, and tokens are a function of (seed, position).

For measuring everything around the model. Its distribution puts all probability on one token, which is never an end token, so
a generation ends at its length limit or at a stop id.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

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
        if plan.masks is not None:
            plan.masks.wait()
            plan.masks.fill([matcher for row in plan.rows if row.samples and (matcher := row.sequence.matcher)])
        sampled = Sampled(
            {index: self._sample(row) for index, row in enumerate(plan.rows) if row.samples and row.can_sample}
        )
        for index, row in enumerate(plan.rows):
            if row.scores:
                sampled.scores[index] = _certain_scores(row, sampled.token_ids.get(index, ()))
        self._sleep(max(0.0, started + self._step_s - self._clock()))
        return sampled

    def _sample(self, row: RowPlan) -> list[int]:
        num_tokens = 1 + len(row.draft)
        numbers = uniforms([row.sequence.controls.seed] * num_tokens, range(row.end, row.end + num_tokens))
        if (matcher := row.sequence.matcher) is None:
            token_ids: list[int] = self._ids[(numbers * len(self._ids)).astype(np.int64)].tolist()
            return token_ids
        return [
            self._allowed_token(mask, number)
            for mask, number in zip(matcher.masks[:num_tokens], numbers.tolist(), strict=True)
        ]

    def _allowed_token(self, mask: NDArray[np.int32], number: float) -> int:
        """One of the tokens that a grammar allows; an end token only where nothing else may come."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.limits.vocab_size]
        allowed = np.flatnonzero(bits)
        going_on = np.setdiff1d(allowed, self.limits.end_token_ids, assume_unique=True)
        choice = going_on if len(going_on) else allowed
        return int(choice[int(number * len(choice))])


def _certain_scores(row: RowPlan, sampled: Sequence[int]) -> TokenScores:
    """Logprob 0 for each token, and nothing besides it to list."""
    ids = np.append(row.known_targets(), np.array(sampled, np.int32))
    num_top = min(1, row.sequence.sampling.num_logprobs or 0)
    return TokenScores(
        chosen=np.zeros(len(ids), np.float32),
        top_ids=ids[:, None][:, :num_top].astype(np.int32),
        top=np.zeros((len(ids), num_top), np.float32),
    )
